"""Counts of `make trace-token` for invented calls."""

from __future__ import annotations

from types import CodeType

import pytest

from tests.campaigns.trace_token import TraceOptions, report, typical_step
from worker.core.request import Request
from worker.plan.plan import SampleDigest

PENDING, WANTED = (
    getattr(Request, name).fget.__code__ for name in ("num_pending", "num_to_compute")
)
DIGEST, UPDATE = SampleDigest.value.__code__, SampleDigest.update.__code__


def test_the_most_frequent_step_is_typical() -> None:
    steps: list[list[CodeType]] = [[PENDING, WANTED, WANTED], [UPDATE], [WANTED, PENDING]]
    assert typical_step(steps) == {PENDING, WANTED}
    with pytest.raises(ValueError, match="no steps"):
        typical_step([])


def test_files_are_counted_once_and_functions_in_every_room() -> None:
    other = pytest.raises.__code__
    result = report({"core": {PENDING, WANTED, UPDATE, other}, "rank": {UPDATE, DIGEST}})
    assert result["rooms"] == {
        "core": {"files": 2, "functions": 3},
        "rank": {"files": 1, "functions": 2},
    }
    assert (result["files"], result["functions"], result["core_functions"]) == (2, 5, 3)
    assert result["entered"]["rank"] == {
        "worker/plan/plan.py": "SampleDigest.update, SampleDigest.value"
    }
    assert all(check["holds"] for check in result["checks"])


def test_a_request_has_enough_tokens() -> None:
    with pytest.raises(ValueError, match="at least 16"):
        TraceOptions(output_len=8)
