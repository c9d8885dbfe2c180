"""Reports of benchmarks: results as a JSON object or tables, and checks of goals."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_PIPE_WIDTH = 200
"""Width of tables if the output is not a terminal, enough for full names."""
Result = dict[str, Any]
"""Result of a benchmark: JSON-ready, with a list `checks`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """Comparison of a measured value with its goal."""

    name: str
    value: float
    unit: str
    goal: str
    """Comparison and limit, such as "<= 0.19"."""
    holds: bool


def at_most(name: str, value: float, unit: str, limit: float) -> Check:
    """Check that holds if value <= limit."""
    return Check(name=name, value=value, unit=unit, goal=f"<= {limit:g}", holds=value <= limit)


def at_least(name: str, value: float, unit: str, limit: float) -> Check:
    """Check that holds if value >= limit."""
    return Check(name=name, value=value, unit=unit, goal=f">= {limit:g}", holds=value >= limit)


def exactly(name: str, value: float, unit: str, expected: float) -> Check:
    """Check that holds if value == expected; for counts."""
    return Check(
        name=name, value=value, unit=unit, goal=f"== {expected:g}", holds=value == expected
    )


def checks_json(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """List of checks in the format of a result's `checks`."""
    return [asdict(check) for check in checks]


def emit(result: Result, *, as_json: bool, title: str) -> None:
    """Prints a result to standard output, as one JSON object or as tables."""
    if as_json:
        json.dump(json_ready({"checks": [], **result}), sys.stdout, allow_nan=False)
        sys.stdout.write("\n")
        return
    # Imported here, as parsing flags does not need tables.
    from rich.console import Console

    from cluster.bench.console import print_result

    print_result(result, title, Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH))


def json_ready(value: Any) -> Any:
    """A result with None in place of NaN and infinity, which JSON cannot represent."""
    if isinstance(value, Mapping):
        return {name: json_ready(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def count_errors(results: Iterable[Result]) -> dict[str, int]:
    """Number of failed requests of several results by reason, most frequent first."""
    total: Counter[str] = Counter()
    for result in results:
        total.update(result.get("errors", {}))
    return dict(total.most_common())


def describe_failures(errors: Mapping[str, int]) -> str:
    """Text with the number of failed requests and the most frequent reason.

    Args:
        errors: number of requests by reason, most frequent first (see `count_errors`).
    """
    reason, count = next(iter(errors.items()))
    failed = sum(errors.values())
    part = "all" if count == failed else f"{count} of them"
    return f"{failed} requests failed, {part} with: {reason}"


def note(text: str) -> None:
    """Prints a progress line to standard error, as standard output is for the result."""
    print(text, file=sys.stderr, flush=True)
