"""Keeps a rank in step with its coordinator, or ends it."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from worker.plan.plan import Plan, SampleDigest, StepResult


class OutOfStep(RuntimeError):
    """This rank missed a Plan or sampled other tokens than rank 0."""


RUN_AHEAD = 1
"""Steps that a rank may have launched beyond the last one whose tokens it has looked at."""


class Launched(Protocol):
    """A step that a rank has launched."""

    @property
    def seq(self) -> int:
        """Number of its Plan."""
        ...

    def result(self) -> StepResult:
        """Its result; waits for the device."""
        ...


class PlanGuard:
    """Checks each Plan's sequence number, and every digest of sampled tokens that a Plan carries.

    A rank that went on after either mismatch would mix requests in the next all-reduce, which
    shows as wrong text and nothing else.
    """

    def __init__(self) -> None:
        self._last_seq = 0
        self._digest = SampleDigest()
        self._launched: deque[Launched] = deque()
        """Steps whose tokens were not looked at yet."""

    def check(self, plan: Plan) -> None:
        """Raises OutOfStep if `plan` is not the next one or its digest is not this rank's."""
        if plan.seq != self._last_seq + 1:
            raise OutOfStep(f"Plan {plan.seq} arrived after Plan {self._last_seq}: one was lost")
        self._last_seq = plan.seq
        while self._launched and self._launched[0].seq <= plan.digest_seq:
            self.record(self._launched.popleft().result())
        if plan.digest_seq and self._digest.value(plan.digest_seq) != plan.digest:
            raise OutOfStep(f"sampled tokens up to step {plan.digest_seq} differ from rank 0's")

    def record(self, result: StepResult) -> None:
        """Notes what this rank sampled."""
        self._digest.update(result.seq, result.token_ids)

    def follow(self, step: Launched) -> None:
        """Notes what this rank samples in a step once it is over, and waits for older ones only."""
        self._launched.append(step)
        while len(self._launched) > RUN_AHEAD:
            self.record(self._launched.popleft().result())
