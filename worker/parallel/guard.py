"""Keeps a rank in step with its coordinator, or ends it."""

from __future__ import annotations

from worker.scheduler.digest import SampleDigest
from worker.scheduler.plan import Plan, StepResult


class OutOfStep(RuntimeError):
    """This rank missed a Plan or sampled other tokens than rank 0."""


class PlanGuard:
    """Checks each Plan's sequence number, and every digest of sampled tokens that a Plan carries.

    A rank that went on after either mismatch would mix requests in the next all-reduce, which
    shows as wrong text and nothing else.
    """

    def __init__(self) -> None:
        self._last_seq = 0
        self._digest = SampleDigest()

    def check(self, plan: Plan) -> None:
        """Raises OutOfStep if `plan` is not the next one or its digest is not this rank's."""
        if plan.seq != self._last_seq + 1:
            raise OutOfStep(f"Plan {plan.seq} arrived after Plan {self._last_seq}: one was lost")
        self._last_seq = plan.seq
        if plan.digest_seq and self._digest.value(plan.digest_seq) != plan.digest:
            raise OutOfStep(f"sampled tokens up to step {plan.digest_seq} differ from rank 0's")

    def record(self, result: StepResult) -> None:
        """Notes what this rank sampled."""
        self._digest.update(result.seq, result.token_ids)
