"""Requests that a frontend rejects before they reach the scheduler."""

from __future__ import annotations

import numpy as np
import pytest

from worker.frontend.intake import reject_early
from worker.protocol.admission import AdmissionChange
from worker.protocol.messages import EngineInfo, LoadSnapshot, Submit
from worker.protocol.sampling import SamplingParams


def info(**limits: int) -> EngineInfo:
    return EngineInfo("m", 64, 64, 50, 4, 8, [0], "m", **limits)


def submit(**options: object) -> Submit:
    fields: dict[str, object] = {
        "request_id": "r",
        "gateway_id": "g",
        "prompt": np.asarray([3] * 4, "<i4").tobytes(),
        "sampling": SamplingParams(),
        **options,
    }
    return Submit(**fields)  # type: ignore[arg-type]


FULL = LoadSnapshot(
    num_running=8,
    num_waiting=5,
    max_num_seqs=8,
    num_submits_seen=20,
    num_queued_tokens=40,
    least_queued_priority=4,
    retry_after_s=7,
)


def test_a_full_queue_rejects_requests_of_equal_urgency() -> None:
    rejection = reject_early(submit(), info(max_queued_requests=5), FULL, 20)
    assert rejection is not None
    assert (rejection.status, rejection.retry_after_s) == (429, 7)
    assert "5 requests, 40 tokens" in rejection.message


@pytest.mark.parametrize(
    "options",
    [{"priority": 5}, {"num_resumed": 1}, {"is_resubmitted": True}, {"tenant": "t"}],
    ids=["more urgent", "begun elsewhere", "taken elsewhere", "fair share decides"],
)
def test_rank_0_decides_if_another_request_may_be_replaced(options: dict[str, object]) -> None:
    assert reject_early(submit(**options), info(max_queued_requests=5), FULL, 20) is None


def test_submits_since_the_last_load_count() -> None:
    assert reject_early(submit(), info(max_queued_requests=8), FULL, 22) is None
    assert reject_early(submit(), info(max_queued_requests=8), FULL, 23) is not None


def test_requests_with_free_slots_do_not_queue() -> None:
    load = LoadSnapshot(num_running=2, num_waiting=0, max_num_seqs=8, num_submits_seen=0)
    assert reject_early(submit(), info(max_queued_requests=2), load, 7) is None
    assert reject_early(submit(), info(max_queued_requests=2), load, 8) is not None


def test_tokens_also_fill_a_queue_and_zero_is_no_limit() -> None:
    assert reject_early(submit(), info(max_queued_tokens=40), FULL, 20) is not None
    assert reject_early(submit(), info(max_queued_tokens=41), FULL, 20) is None
    assert reject_early(submit(), info(), FULL, 10_000) is None


def test_changes_add_up_and_invalid_ones_are_rejected() -> None:
    change = AdmissionChange({"prefill_admission_policy": "pack", "prefill_max_tokens": 8})
    change = change.then(AdmissionChange({"prefill_max_tokens": 16}))
    assert change.given == {"prefill_admission_policy": "pack", "prefill_max_tokens": 16}
    with pytest.raises(ValueError, match="prefill_admission_lookahead in --scheduler-config"):
        AdmissionChange({"prefill_admission_lookahead": 0})
    assert change.given == {"prefill_admission_policy": "pack", "prefill_max_tokens": 16}
