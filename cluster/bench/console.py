"""Console tables for the result of any benchmark.

Tables are chosen by the structure of the result; lists of scalars are only shown by --json.

    intervals   {median, interval_low, interval_high, ...}: a row, with the number of lost rounds
    latencies   mean_ttft_ms, p99_ttft_ms, ...: a row per metric
    rows        a list of objects with the same keys: a row each
    siblings    nested objects with the same keys, such as one per fleet: a row each

Tables with many columns are transposed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

NO_DATA = "\N{EN DASH}"
_MAX_COLUMNS = 10
_LATENCY = re.compile(r"(mean|median|std|p[\d.]+)_(\w+)_ms")
_MIN_STATISTICS = 3
"""Minimum number of statistics of a metric for a row in the table of latencies."""
_SEPARATE = ("checks", "errors", "options", "client", "versions")
"""Keys of a result that are skipped: the first two have separate tables, the others are only used
in reports."""

Path = tuple[str, ...]
Facts = Mapping[str, Any]


@dataclass(kw_only=True, slots=True)
class _Sheet:
    """Values of a result, grouped by the kind of table that shows them."""

    facts: dict[Path, dict[str, Any]] = field(default_factory=dict)
    """Scalar values, keyed by the path of the enclosing object."""
    rows: dict[Path, Sequence[Facts]] = field(default_factory=dict)
    """Lists of rows, keyed by path."""
    intervals: dict[Path, Facts] = field(default_factory=dict)
    """Intervals, keyed by path."""

    def add(self, path: Path, result: Facts) -> None:
        """Adds an object at `path` with all nested objects."""
        for name, value in result.items():
            if name in _SEPARATE:
                continue
            if isinstance(value, Mapping):
                interval = _interval(value)
                where = path if name == "spread" else (*path, name)
                if interval is None:
                    self.add(where, value)
                else:
                    self.intervals[where] = interval
            elif name == "rows":
                self.rows[path] = value
            elif isinstance(value, list | tuple):
                for item in value:
                    if isinstance(item, Mapping):
                        (key, first), *rest = item.items()
                        self.add((*path, f"{key} {first}"), dict(rest))
            elif value is not None:
                self.facts.setdefault(path, {})[name] = value


def print_result(result: Facts, title: str, console: Console) -> None:
    """Prints all tables of a result, its checks last."""
    sheet = _Sheet()
    sheet.add((), result)
    shown = {check["name"] for check in result.get("checks", ())}
    top = {
        name: value
        for name, value in sheet.facts.pop((), {}).items()
        if name not in shown and not _has_row(name, value, sheet.intervals)
    }
    latencies = _latencies(top)
    plain = {name: value for name, value in top.items() if not _of(latencies, name)}
    console.print(_facts_table(title, plain))
    if latencies:
        console.print(_table("milliseconds", latencies))
    for table in _nested_tables(sheet.facts):
        console.print(table)
    for path, rows in sheet.rows.items():
        if rows:
            console.print(_rows_table(path, rows))
    if sheet.intervals:
        console.print(_intervals_table(sheet.intervals))
    if result.get("errors"):
        console.print(_errors_table(result["errors"]))
    if result.get("checks"):
        console.print(_checks_table(result["checks"]))


def readable(value: Any) -> str:
    """Formatted value; a dash if there is no data."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return NO_DATA
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 9999.5 else f"{value:,.4g}"
    return str(value)


def _interval(value: Facts) -> Facts | None:
    """The interval, if the object is one or a `Turns.comparison`; otherwise None."""
    if isinstance(value.get("ratio"), Mapping) and "losing_rounds" in value:
        return {**value["ratio"], "losing_rounds": value["losing_rounds"]}
    return value if "interval_low" in value else None


def _has_row(name: str, value: Any, intervals: Mapping[Path, Facts]) -> bool:
    """Whether the table of intervals has a row for a metric."""
    return any(
        path and name.endswith(path[-1]) and value == found.get("median")
        for path, found in intervals.items()
    )


def _latencies(facts: Facts) -> dict[str, dict[str, Any]]:
    """Statistics by metric, from names such as p99_ttft_ms."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in facts.items():
        if match := _LATENCY.fullmatch(name):
            found.setdefault(match[2], {})[match[1]] = value
    return {metric: row for metric, row in found.items() if len(row) >= _MIN_STATISTICS}


def _of(latencies: Mapping[str, Facts], name: str) -> bool:
    match = _LATENCY.fullmatch(name)
    return match is not None and match[2] in latencies


def _nested_tables(facts: Mapping[Path, Facts]) -> Iterator[Table]:
    """Tables of nested objects; siblings with the same keys share a table."""
    groups: dict[tuple[Path, tuple[str, ...]], dict[str, Facts]] = {}
    for path, values in facts.items():
        groups.setdefault((path[:-1], tuple(values)), {})[path[-1]] = values
    for (path, _), siblings in groups.items():
        if len(siblings) > 1:
            yield _table(" ".join(path), siblings)
        else:
            [(name, values)] = siblings.items()
            yield _facts_table(" ".join((*path, name)), values)


def _titled(title: str, *, show_header: bool = True) -> Table:
    """Empty table that is at least as wide as its title."""
    return Table(title=escape(title) or None, min_width=len(title), show_header=show_header)


def _facts_table(title: str, facts: Facts) -> Table:
    table = _titled(title, show_header=False)
    table.add_column("name")
    table.add_column("value", justify="right")
    for name, value in facts.items():
        table.add_row(escape(name), escape(readable(value)))
    return table


def _rows_table(path: Path, rows: Sequence[Facts]) -> Table:
    """Table with a row per object, transposed if it has many columns and few rows."""
    if len(rows[0]) > _MAX_COLUMNS >= len(rows):
        columns = {str(next(iter(row.values()))): dict(list(row.items())[1:]) for row in rows}
        if len(columns) == len(rows):
            return _transposed(" ".join(path), columns)
    table = _titled(" ".join(path))
    for name, value in rows[0].items():
        table.add_column(escape(name), justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*(escape(readable(row.get(name))) for name in rows[0]))
    return table


def _table(title: str, rows: Mapping[str, Facts]) -> Table:
    """Table with a row per name, transposed if it has many columns; half-widths of intervals are
    shown as ± after their values."""
    rows = {name: _with_halves(row) for name, row in rows.items()}
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    if len(columns) > _MAX_COLUMNS:
        return _transposed(title, rows)
    table = _titled(title)
    table.add_column("")
    for column in columns:
        table.add_column(escape(column), justify="right")
    for name, row in rows.items():
        table.add_row(escape(name), *(escape(readable(row.get(column))) for column in columns))
    return table


def _transposed(title: str, columns: Mapping[str, Facts]) -> Table:
    """Transposed table: a column per object, and a row per metric."""
    table = _titled(title)
    table.add_column("")
    for column in columns:
        table.add_column(escape(column), justify="right")
    for name in dict.fromkeys(name for column in columns.values() for name in column):
        cells = (escape(readable(column.get(name))) for column in columns.values())
        table.add_row(escape(name), *cells)
    return table


def _with_halves(row: Facts) -> dict[str, Any]:
    return {
        name: f"{readable(value)} ± {readable(row[f'{name}_ci'])}" if f"{name}_ci" in row else value
        for name, value in row.items()
        if not (name.endswith("_ci") and name.removesuffix("_ci") in row)
    }


def _intervals_table(intervals: Mapping[Path, Facts]) -> Table:
    table = Table(title="intervals over the rounds")
    table.add_column("of")
    table.add_column("figure")
    for column in ("median", "95 % interval", "rounds lost"):
        table.add_column(column, justify="right")
    for path, found in intervals.items():
        *where, name = path or ("",)
        lost, count = found.get("losing_rounds"), found.get("count")
        low, high = readable(found["interval_low"]), readable(found["interval_high"])
        table.add_row(
            escape(" ".join(where)),
            escape(name),
            readable(found.get("median", found.get("ratio"))),
            NO_DATA if low == high == NO_DATA else f"{low} to {high}",
            NO_DATA if lost is None else f"{len(lost)} of {count}",
        )
    return table


def _errors_table(errors: Mapping[str, int]) -> Table:
    table = Table(title="failed requests")
    table.add_column("requests", justify="right")
    table.add_column("reason")
    for reason, count in errors.items():
        table.add_row(str(count), escape(reason))
    return table


def _checks_table(checks: Sequence[Facts]) -> Table:
    table = Table(title="checks")
    for column in ("check", "value", "unit", "goal", "passed"):
        table.add_column(column)
    for check in checks:
        mark = "[green]yes[/]" if check["holds"] else "[red]NO[/]"
        value = readable(check["value"])
        table.add_row(escape(check["name"]), value, check["unit"], check["goal"], mark)
    return table
