"""A rank that lost a Plan or sampled other tokens must exit."""

from __future__ import annotations

import pytest

from worker.plan.plan import Plan, SampleDigest, StepResult
from worker.rank.guard import OutOfStep, PlanGuard


def plan(seq: int, digest_seq: int = 0, digest: int = 0) -> Plan:
    return Plan(seq=seq, admits=[], page_writes=[], rows=[], digest_seq=digest_seq, digest=digest)


def result(seq: int, *token_ids: int) -> StepResult:
    return StepResult(seq=seq, token_ids=list(token_ids), compute_ms=0.0)


def test_plans_in_sequence_pass() -> None:
    guard = PlanGuard()
    for seq in range(1, 5):
        guard.check(plan(seq))
        guard.record(result(seq, seq))


def test_a_gap_ends_the_rank() -> None:
    guard = PlanGuard()
    guard.check(plan(1))
    with pytest.raises(OutOfStep, match="Plan 3 arrived after Plan 1"):
        guard.check(plan(3))


@pytest.mark.parametrize(("sampled", "agrees"), [((7, 8), True), ((7, 9), False)])
def test_digests_are_compared(sampled: tuple[int, int], agrees: bool) -> None:
    rank0 = SampleDigest()
    rank0.update(1, [7, 8])
    guard = PlanGuard()
    guard.check(plan(1))
    guard.record(result(1, *sampled))
    carrying = plan(2, digest_seq=1, digest=rank0.value(1))
    if agrees:
        guard.check(carrying)
    else:
        with pytest.raises(OutOfStep, match="differ from rank 0's"):
            guard.check(carrying)


class LaunchedStep:
    """A step on a device, whose tokens must not be read before it completes."""

    def __init__(self, seq: int, token_id: int, journal: list[int]) -> None:
        self.seq = seq
        self._token_id = token_id
        self._journal = journal

    def result(self) -> StepResult:
        self._journal.append(self.seq)
        return result(self.seq, self._token_id)


def test_a_rank_looks_at_its_tokens_one_step_late() -> None:
    guard, journal = PlanGuard(), list[int]()
    for seq in range(1, 4):
        guard.check(plan(seq))
        guard.follow(LaunchedStep(seq, 7, journal))
        assert journal == list(range(1, seq))


@pytest.mark.parametrize("agrees", [True, False])
def test_a_digest_waits_for_the_steps_that_it_covers(agrees: bool) -> None:
    rank0, guard, journal = SampleDigest(), PlanGuard(), list[int]()
    for seq in (1, 2):
        rank0.update(seq, [seq + 10])
        guard.check(plan(seq))
        guard.follow(LaunchedStep(seq, seq + 10 if agrees else 5, journal))
    carrying = plan(3, digest_seq=2, digest=rank0.value(2))
    if agrees:
        guard.check(carrying)
    else:
        with pytest.raises(OutOfStep, match="differ from rank 0's"):
            guard.check(carrying)
    assert journal == [1, 2]
