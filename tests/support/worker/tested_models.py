"""Collects, from the marks of tests, what is tested for each family, for `rayfleet models`.

A mark has the checks, the checkpoints, and the references of the results ("A and B"), unless they
are those of the specimens:

    @pytest.mark.checks("alone", of=SPECIMENS)
    @pytest.mark.checks(formats=LAYOUTS, of="Qwen3MoeForCausalLM", against="...")

`python -m tests.support.worker.tested_models --write` updates the record in the package, and the
table in worker/models/README.md, as `make families` does.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.support.checkpoints.dense import SPECS, WINDOWED
from tests.support.checkpoints.families import SPECIMENS
from tests.support.paths import ROOT
from tests.support.worker.real_configs import VERDICTS, load_corpus
from worker.models.config.families import FAMILIES, MULTIMODAL
from worker.models.config.tested_families import (
    CHECKS,
    RECORD,
    TestedFamily,
    tested_families,
    tested_formats,
)

README = ROOT / "worker" / "models" / "README.md"
_MARK = re.compile(r"^@pytest\.mark\.checks\(", re.MULTILINE)
_BEGIN, _END = "<!-- generated: families -->\n", "<!-- end of families -->\n"

Record = dict[str, Any]
"""The content of tested_families.json."""


def architecture_of(name: str) -> str:
    """Value of `architectures` of the checkpoint with this name in tests; an architecture is
    returned unchanged."""
    if name in FAMILIES or name in MULTIMODAL:
        return name
    if name in SPECIMENS:
        return SPECIMENS[name].served_architecture
    return (SPECS | WINDOWED)[name].model_class.__name__


def read_tests() -> Record:
    """The record of all marks, in a fixed order."""
    checks: dict[str, dict[str, set[str]]] = {}
    formats: dict[str, dict[str, set[str]]] = {}
    for mark in _marks():
        names = [mark.kwargs["of"]] if isinstance(mark.kwargs["of"], str) else mark.kwargs["of"]
        families = {name: architecture_of(name) for name in names}
        for name, family in families.items():
            for check in mark.args:
                assert check in CHECKS, f"unknown check {check}: use one of {', '.join(CHECKS)}"
                against = checks.setdefault(family, {}).setdefault(check, set())
                reference = mark.kwargs.get("against") or SPECIMENS[name].reference
                against.update(reference.split(" and "))
        for name in mark.kwargs.get("formats", ()):
            row = formats.setdefault(name, {"of": set(), "against": set()})
            row["of"] |= set(families.values())
            row["against"].add(mark.kwargs["against"])
    return {"checks": _plain(checks), "formats": _plain(formats), "released": _released()}


def table(families: Iterable[TestedFamily]) -> str:
    """The table for the README, and the meaning of its columns."""
    rows = ["| family | " + " | ".join(CHECKS) + " |", "|---" * (len(CHECKS) + 1) + "|"]
    compared: dict[str, set[str]] = {}
    for family in families:
        name = family.architecture + (" (text)" if family.text_of else "")
        cells = ("x" if check in family.checks else "" for check in CHECKS)
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
        for check, against in family.checks.items():
            compared.setdefault(check, set()).update(against)
    rows.append("")
    for check, meaning in CHECKS.items():
        rows.append(f"- {check}: {meaning} (compared with: {'; '.join(sorted(compared[check]))})")
    formats: dict[str, list[str]] = {}
    for row in tested_formats():
        formats.setdefault(" and ".join(row.against), []).append(row.name)
    for reference, names in formats.items():
        title = f"Weight formats (names in the tests), compared with {reference}"
        rows.append(f"\n{title}: {', '.join(names)}.")
    return "\n".join([*rows, ""])


def generated_part() -> str:
    """The README's text between its marks."""
    text = README.read_text(encoding="utf-8")
    return text[text.index(_BEGIN) + len(_BEGIN) : text.index(_END)]


def _marks() -> Iterator[Any]:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if _MARK.search(path.read_text(encoding="utf-8")):
            yield from _marks_of(path)


def _marks_of(path: Path) -> Iterator[Any]:
    """Marks of a file, as pytest finds them."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for key, test in vars(importlib.import_module(name)).items():
        if key.startswith("test_"):
            yield from (mark for mark in getattr(test, "pytestmark", ()) if mark.name == "checks")


def _released() -> dict[str, list[str]]:
    """Released models that are accepted, by value of `architectures`."""
    verdicts = json.loads(VERDICTS.read_text(encoding="utf-8"))
    released: dict[str, set[str]] = {}
    for real in load_corpus():
        if real.release is not None and "accepted" in verdicts[real.name]:
            name = real.config["architectures"][0]
            if name not in MULTIMODAL:
                name = verdicts[real.name]["accepted"]["architecture"]
            released.setdefault(name, set()).add(real.release)
    return {family: sorted(names) for family, names in sorted(released.items())}


def _plain(sets: Mapping[str, Mapping[str, set[str]]]) -> dict[str, dict[str, list[str]]]:
    return {
        name: {key: sorted(values) for key, values in sorted(sets[name].items())}
        for name in sorted(sets)
    }


def main() -> None:
    """Prints whether the record matches the tests; --write updates it and the README's table."""
    record = read_tests()
    if "--write" in sys.argv:
        parts = (
            f"{json.dumps(part)}: {{\n"
            + ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in rows.items())
            + "\n}"
            for part, rows in record.items()
        )
        RECORD.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
        text = README.read_text(encoding="utf-8")
        new = text.replace(_BEGIN + generated_part(), _BEGIN + table(tested_families()))
        README.write_text(new, encoding="utf-8")
    is_same = json.loads(RECORD.read_text(encoding="utf-8")) == record
    print("matches the tests" if is_same else "does not match the tests: --write updates it")


if __name__ == "__main__":
    main()
