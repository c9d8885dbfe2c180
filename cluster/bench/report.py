"""How benchmarks report: one JSON object, or a table; goals as checks in both."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

_PIPE_WIDTH = 200
"""Columns of a table that no terminal bounds: names in it stay whole."""
Result = dict[str, Any]
"""What a benchmark returns: JSON-ready, with a list `checks`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One measured value against its goal."""

    name: str
    value: float
    unit: str
    goal: str
    """Comparison and limit, such as "<= 0.19"."""
    holds: bool


def at_most(name: str, value: float, unit: str, limit: float) -> Check:
    """Holds where value <= limit."""
    return Check(name=name, value=value, unit=unit, goal=f"<= {limit:g}", holds=value <= limit)


def at_least(name: str, value: float, unit: str, limit: float) -> Check:
    """Holds where value >= limit."""
    return Check(name=name, value=value, unit=unit, goal=f">= {limit:g}", holds=value >= limit)


def exactly(name: str, value: float, unit: str, wanted: float) -> Check:
    """Holds where value == wanted; for counts."""
    return Check(name=name, value=value, unit=unit, goal=f"== {wanted:g}", holds=value == wanted)


def checks_json(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """The `checks` list of a result."""
    return [asdict(check) for check in checks]


def emit(result: Result, *, as_json: bool, title: str) -> None:
    """Prints a result to standard output: one JSON object, or a table of its numbers."""
    if as_json:
        json.dump(result, sys.stdout, allow_nan=False)
        sys.stdout.write("\n")
        return
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    console.print(_values_table(title, result))
    if result.get("rows"):
        console.print(_rows_table(result["rows"]))
    if result.get("checks"):
        console.print(_checks_table(result["checks"]))


def note(text: str) -> None:
    """Prints a line of progress to standard error, so that standard output stays one object."""
    print(text, file=sys.stderr, flush=True)


def _values_table(title: str, result: Mapping[str, Any]) -> Table:
    table = Table(title=title, show_header=False)
    table.add_column("name")
    table.add_column("value", justify="right")
    for name, value in _flat(result):
        table.add_row(name, f"{value:,.3f}" if isinstance(value, float) else str(value))
    return table


def _rows_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Rows of equal columns."""
    table = Table()
    for name, value in rows[0].items():
        table.add_column(name, justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*(f"{v:,.2f}" if isinstance(v, float) else str(v) for v in row.values()))
    return table


def _flat(result: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in result.items():
        if isinstance(value, dict):
            rows.extend(_flat(value, f"{prefix}{name}."))
        elif isinstance(value, list) and name != "rows":
            for place, item in enumerate(value):
                if isinstance(item, dict) and name != "checks":
                    rows.extend(_flat(item, f"{prefix}{name}[{place}]."))
        elif value is not None and not isinstance(value, list):
            rows.append((prefix + name, value))
    return rows


def _checks_table(checks: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="checks")
    for column in ("check", "value", "unit", "goal", "holds"):
        table.add_column(column)
    for check in checks:
        mark = "[green]yes[/]" if check["holds"] else "[red]NO[/]"
        table.add_row(check["name"], f"{check['value']:,.4g}", check["unit"], check["goal"], mark)
    return table
