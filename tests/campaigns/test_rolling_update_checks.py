"""Checks of the rolling-update campaign."""

from __future__ import annotations

import pytest

from cluster.bench.client import Record
from tests.campaigns.rolling_update import RollingUpdateOptions, judge

OPTIONS = RollingUpdateOptions(num_requests=2)
ALL_GONE = {"gateway": 0, "worker": 0}


def record(status: int = 200, *, error: str = "", output_len: int = 8) -> Record:
    return Record(
        index=0, prompt_len=0, requested_len=8, status=status, error=error, output_len=output_len
    )


def broken(records: list[Record], kept: dict[str, int] | None = None) -> list[str]:
    checks = judge(records, kept or ALL_GONE, OPTIONS)
    return [check.name for check in checks if not check.holds]


def test_whole_answers_and_a_fleet_of_new_processes_are_fine() -> None:
    assert broken([record(), record()]) == []


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        (record(503, error="HTTP 503", output_len=0), ["failed", "refused"]),
        (record(0, error="ServerDisconnectedError", output_len=0), ["failed"]),
        (record(error="the stream ended without [DONE]"), ["failed"]),
        (record(output_len=7), ["failed"]),
    ],
)
def test_every_other_end_is_named(wrong: Record, names: list[str]) -> None:
    assert broken([record(), wrong, record()]) == names


def test_too_few_requests_and_old_processes_are_named() -> None:
    assert broken([record()]) == ["requests"]
    assert broken([record(), record()], {"gateway": 1, "worker": 0}) == ["old_gateways_left"]
