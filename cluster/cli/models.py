"""`rayfleet models`: lists supported model families, and the tests of each."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence

from worker.models.config.tested_families import (
    CHECKS,
    TestedFamily,
    tested_families,
    tested_formats,
)

_MAX_DETAILED = 3
"""Maximum number of families that are described in detail; more are listed in a table."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `rayfleet models` to its parser."""
    parser.description = (
        "Lists supported model families, by `architectures` in config.json, and how they are "
        "tested; fine-tuned models of a family are supported as well. For the models that an "
        "endpoint serves, use GET /v1/models or `rayfleet top`."
    )
    parser.add_argument(
        "name", nargs="?", default="", help="part of the name of a family or a released model"
    )
    parser.add_argument("--json", action="store_true", help="print all details as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the families that match the name; returns the exit code, 1 if there is none."""
    word = arguments.name.lower()
    families = [family for family in tested_families() if family.fits(word)]
    if arguments.json:
        details = {
            "families": [dataclasses.asdict(family) for family in families],
            "formats": [dataclasses.asdict(weights) for weights in tested_formats()],
        }
        print(json.dumps(details, indent=2))
    elif not families:
        print(f"no model family or known model matches {arguments.name}")
    elif len(families) <= _MAX_DETAILED:
        print("\n\n".join(_details(family, word) for family in families))
    else:
        print(_table(families))
    return 0 if families else 1


def _table(families: Sequence[TestedFamily]) -> str:
    """Text with a row per family, the meaning of the columns, and the weight formats."""
    formats: dict[tuple[str, ...], list[str]] = {}
    for weights in tested_formats():
        formats.setdefault(weights.against, []).append(weights.name)
    names = [family.architecture + (" (text)" if family.text_of else "") for family in families]
    width = max(map(len, names))
    lines = [" ".join([" " * width, *CHECKS])]
    for name, family in zip(names, families, strict=True):
        cells = (("x" if c in family.checks else "-").center(len(c)) for c in CHECKS)
        lines.append(" ".join([name.ljust(width), *cells]).rstrip())
    lines += ["", "Tests, and the references that results are compared with:"]
    for check, meaning in CHECKS.items():
        against = {name for family in families for name in family.checks.get(check, ())}
        lines.append(f"  {check}: {meaning}" + _against(sorted(against)))
    lines += [
        "",
        "Weights: safetensors in bf16, fp16 or fp32, or quantized in one of these tested formats:",
        *(f"  {', '.join(names)}{_against(against)}" for against, names in formats.items()),
        "",
        "`rayfleet models NAME` prints the details of a family, or the family of a released model.",
    ]
    return "\n".join(lines)


def _details(family: TestedFamily, word: str) -> str:
    lines = [family.architecture, f"  model_type: {', '.join(family.model_types)}"]
    if family.text_of:
        lines.append(f"  text only, served as {' or '.join(family.text_of)}")
    for check, meaning in CHECKS.items():
        if check in family.checks:
            lines.append(f"  {check}: {meaning}{_against(family.checks[check])}")
    if missing := [check for check in CHECKS if check not in family.checks]:
        lines.append(f"  not tested: {', '.join(missing)}")
    matching = [name for name in family.released if word in name.lower()] or family.released
    if matching:
        lines.append(f"  released models known to be supported: {', '.join(matching)}")
    return "\n".join(lines)


def _against(references: Sequence[str]) -> str:
    return f" (compared with: {'; '.join(references)})" if references else ""
