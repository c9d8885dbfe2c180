"""config.json of released models, and rayfleet's verdict on each.

`python -m tests.support.worker.real_configs` counts the verdicts, and with `--write` updates
verdicts.json, as `make families` does. tests/worker/models/configs/README.md describes the format
of configurations.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from tests.support.paths import ROOT
from worker.models.config.families import FAMILIES
from worker.models.config.model_config import ModelConfig, load_model_config

FOLDER = Path(__file__).parents[2] / "worker" / "models" / "configs"
VERDICTS = FOLDER / "verdicts" / "verdicts.json"
README = ROOT / "README.md"
SUMMARY = re.compile(r"Of the \d+ configurations of released models in the tests, \d+ \(\d+ %\)")
"""The acceptance rate in the README, on one line."""
OWN = ("unverified", "made")
"""Values of `_source` without a public source."""
_RELEASE = re.compile(r"(\S+/\S+)( \([^)]*\))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class RealConfig:
    """The configuration files of one checkpoint."""

    name: str
    """Name on the Hub, possibly with a note in parentheses, or a description of how it was made."""
    source: str
    """Source of the values: a row of the table in README.md."""
    config: Mapping[str, Any]
    """The content of config.json."""
    files: Mapping[str, Any]
    """The content of further JSON files, by name."""

    @property
    def release(self) -> str | None:
        """Name on the Hub of the released model; None if it was changed."""
        match = _RELEASE.fullmatch(self.name)
        return None if match is None else match[1]

    def write(self, folder: Path) -> None:
        """Writes the files to a folder, without weights."""
        for name, content in {**self.files, "config.json": self.config}.items():
            (folder / name).write_text(json.dumps(content), encoding="utf-8")

    def read(self, folder: Path) -> ModelConfig:
        """The ModelConfig of the checkpoint. Raises ValueError if it is rejected.

        Args:
            folder: an empty folder, to which the files are written.
        """
        self.write(folder)
        return load_model_config(str(folder), weights=False)


@cache
def load_corpus() -> tuple[RealConfig, ...]:
    """All configurations, in the order of their files; read once, for all tests of a process."""
    return tuple(config for path in sorted(FOLDER.glob("*.json")) for config in _load_family(path))


def verdict(real: RealConfig) -> dict[str, Any]:
    """The ModelConfig in JSON's types, or the error. In the error, FAMILIES stands for the list of
    all families, so that a new family does not change every error."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            config = real.read(Path(folder))
        except ValueError as error:
            reason = str(error).replace(folder, "FOLDER").replace(", ".join(FAMILIES), "FAMILIES")
            return {"refused": reason}
    values = {key: value for key, value in asdict(config).items() if key != "folder"}
    return {"accepted": _plain(values)}


def verdicts() -> dict[str, dict[str, Any]]:
    """The verdict on each configuration, by its name."""
    return {real.name: verdict(real) for real in load_corpus()}


def accepted_model(architecture: str) -> str:
    """Name of the first configuration of a family that is accepted; raises LookupError if there is
    none."""
    known = json.loads(VERDICTS.read_text(encoding="utf-8"))
    for real in load_corpus():
        if known[real.name].get("accepted", {}).get("architecture") == architecture:
            return real.name
    raise LookupError(
        f"no released configuration of {architecture}: write one down, as "
        "tests/worker/models/configs/README.md says"
    )


def summary(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The README's statement of the acceptance rate."""
    return f"Of the {len(found)} configurations of released models in the tests, {_rate(found)}"


def _rate(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Number and percentage of accepted configurations."""
    accepted = sum("accepted" in text for text in found.values())
    return f"{accepted} ({100 * accepted / len(found):.0f} %)"


def _load_family(path: Path) -> Iterator[RealConfig]:
    models = json.loads(path.read_text(encoding="utf-8"))
    common = models.pop("_common", {})
    for name in models:
        entry = _inherit(models, name)
        only, without = entry.pop("_only", None), entry.pop("_without", [])
        base = common if only is None else {key: common[key] for key in only}
        config = {key: value for key, value in {**base, **entry}.items() if key not in without}
        source, files = config.pop("_source"), config.pop("_files", {})
        config.pop("_abridged", None)
        yield RealConfig(name=name, source=source, config=_expand(config), files=_expand(files))


def _inherit(models: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An entry merged over the entry that its `_like` names; the other entry's files and missing
    keys are not inherited."""
    entry = dict(models[name])
    parent = entry.pop("_like", None)
    if parent is None:
        return entry
    inherited = _inherit(models, parent)
    for own in ("_files", "_without"):
        inherited.pop(own, None)
    return {**inherited, **entry}


def _expand(value: Any) -> Any:
    """Writes lists out: {"_cycle": [a, b], "_length": n} is a b a b ..., n long, and in a list
    {"_per_layer": ["x.{}"], "_length": n} is x.0, x.1, ..."""
    if isinstance(value, list):
        return [item for part in value for item in _expand_item(part)]
    if not isinstance(value, Mapping):
        return value
    if "_cycle" in value:
        cycle = value["_cycle"]
        return [cycle[place % len(cycle)] for place in range(value["_length"])]
    return {key: _expand(part) for key, part in value.items()}


def _expand_item(item: Any) -> list[Any]:
    if isinstance(item, Mapping) and "_per_layer" in item:
        layers = range(item["_length"])
        return [name.format(layer) for layer in layers for name in item["_per_layer"]]
    return [_expand(item)]


def _plain(value: Any) -> Any:
    """Values in JSON's types; long runs of the same value are counted."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items() if part is not None}
    if isinstance(value, msgspec.Struct):
        return _plain(msgspec.structs.asdict(value))
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, tuple):
        parts = [_plain(part) for part in value]
        return f"{len(parts)} x {parts[0]}" if len(parts) > 4 and len(set(parts)) == 1 else parts
    return value


def main() -> None:
    """Prints reasons of rejections and counts verdicts by source; --write updates verdicts.json and
    the README's acceptance rate."""
    found = verdicts()
    if "--write" in sys.argv:
        lines = (f"{json.dumps(name)}: {json.dumps(text)}" for name, text in found.items())
        VERDICTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        text = README.read_text(encoding="utf-8")
        README.write_text(SUMMARY.sub(summary(found), text), encoding="utf-8")
    for name, one in found.items():
        if "refused" in one:
            print(f"{name}: {one['refused']}")
    counts = Counter((real.source, *found[real.name]) for real in load_corpus())
    for (source, word), count in sorted(counts.items()):
        print(f"{source:12} {word:8} {count:4}")
    print(summary(found))
    sourced = {real.name: found[real.name] for real in load_corpus() if real.source not in OWN}
    print(f"Of the {len(sourced)} from public sources, {_rate(sourced)}")


if __name__ == "__main__":
    main()
