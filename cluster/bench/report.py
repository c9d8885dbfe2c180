"""How benchmarks report: one JSON object, or tables; goals as checks in both."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_PIPE_WIDTH = 200
"""Columns of a table that no terminal bounds: names in it stay whole."""
Result = dict[str, Any]
"""The result of a benchmark: JSON-ready, with a list `checks`."""


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
    """Prints a result to standard output: one JSON object, or tables for people."""
    if as_json:
        json.dump(json_ready({"checks": [], **result}), sys.stdout, allow_nan=False)
        sys.stdout.write("\n")
        return
    # Imported here: whoever only parses flags prints no tables.
    from rich.console import Console

    from cluster.bench.console import print_result

    print_result(result, title, Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH))


def json_ready(value: Any) -> Any:
    """A result with null for figures that have no data: JSON knows no NaN."""
    if isinstance(value, Mapping):
        return {name: json_ready(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def count_errors(results: Iterable[Result]) -> dict[str, int]:
    """Requests of several results by what they failed of, the most frequent first."""
    total: Counter[str] = Counter()
    for result in results:
        total.update(result.get("errors", {}))
    return dict(total.most_common())


def describe_failures(errors: Mapping[str, int]) -> str:
    """How many requests failed, and of what most often. `errors`: as of `count_errors`."""
    reason, count = next(iter(errors.items()))
    failed = sum(errors.values())
    often = "each" if count == failed else f"{count} of them"
    return f"{failed} requests failed, {often} with: {reason}"


def note(text: str) -> None:
    """Prints a line of progress to standard error, so that standard output stays one object."""
    print(text, file=sys.stderr, flush=True)
