"""`rayfleet models`: families of models that are served, and what tests check of each."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence

from worker.models.config.tested_families import (
    CHECKS,
    CheckedFamily,
    checked_families,
    checked_formats,
)

_TOLD_IN_FULL = 3
"""Most families that are described in full; more are listed in a table."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Fills the parser of `rayfleet models`."""
    parser.description = (
        "Families by `architectures` of config.json; fine-tunes of all of them are served."
    )
    parser.add_argument(
        "name", nargs="?", default="", help="a part of the name of a family, or of a released model"
    )
    parser.add_argument("--json", action="store_true", help="print all that is known, as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the families that fit the name; returns the exit code, 1 where none does."""
    word = arguments.name.lower()
    families = [family for family in checked_families() if family.fits(word)]
    if arguments.json:
        said = {
            "families": [dataclasses.asdict(family) for family in families],
            "formats": [dataclasses.asdict(one) for one in checked_formats()],
        }
        print(json.dumps(said, indent=2))
    elif not families:
        print(f"no family and no known model is called {arguments.name}")
    elif len(families) <= _TOLD_IN_FULL:
        print("\n\n".join(_in_full(family, word) for family in families))
    else:
        print(_table(families))
    return 0 if families else 1


def _table(families: Sequence[CheckedFamily]) -> str:
    """Text with a row per family, then the meaning of the columns, then formats of weights."""
    formats: dict[tuple[str, ...], list[str]] = {}
    for one in checked_formats():
        formats.setdefault(one.against, []).append(one.name)
    names = [one.architecture + (" (text)" if one.text_of else "") for one in families]
    width = max(map(len, names))
    lines = [" ".join([" " * width, *CHECKS])]
    for name, family in zip(names, families, strict=True):
        cells = (("x" if c in family.checks else "-").center(len(c)) for c in CHECKS)
        lines.append(" ".join([name.ljust(width), *cells]).rstrip())
    lines += ["", "What tests check, and against what:"]
    for check, meaning in CHECKS.items():
        against = {what for family in families for what in family.checks.get(check, ())}
        lines.append(f"  {check}: {meaning}" + _against(sorted(against)))
    lines += [
        "",
        "Weights are safetensors in bf16, fp16, fp32, or quantized, in formats of the tests:",
        *(f"  {', '.join(names)}{_against(against)}" for against, names in formats.items()),
        "",
        "`rayfleet models NAME` tells all of a family, or which one a released model is of.",
    ]
    return "\n".join(lines)


def _in_full(family: CheckedFamily, word: str) -> str:
    lines = [family.architecture, f"  model_type: {', '.join(family.model_types)}"]
    if family.text_of:
        lines.append(f"  its text alone is served, by {' or '.join(family.text_of)}")
    for check, meaning in CHECKS.items():
        if check in family.checks:
            lines.append(f"  {check}: {meaning}{_against(family.checks[check])}")
    if missing := [check for check in CHECKS if check not in family.checks]:
        lines.append(f"  not checked: {', '.join(missing)}")
    named = [name for name in family.released if word in name.lower()] or family.released
    if named:
        lines.append(f"  released models that are accepted: {', '.join(named)}")
    return "\n".join(lines)


def _against(what: Sequence[str]) -> str:
    return f"; against {', or '.join(what)}" if what else ""
