"""Plan guard: stops a rank that missed a Plan or sampled tokens that differ from rank 0's."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from worker.plan.plan import Plan, SampleDigest, StepResult


class OutOfStep(RuntimeError):
    """This rank missed a Plan or sampled tokens that differ from rank 0's."""


RUN_AHEAD = 1
"""Maximum number of launched steps whose tokens are not yet in the digest."""


class Launched(Protocol):
    """A step that a rank has launched."""

    @property
    def seq(self) -> int:
        """Sequence number of the step's Plan."""
        ...

    def result(self) -> StepResult:
        """Returns the step's result; waits for the device."""
        ...


class PlanGuard:
    """Checks each Plan's sequence number, and every digest of sampled tokens that a Plan carries.

    If a rank continued after a mismatch, the next all-reduce would mix requests, and the only
    symptom would be wrong text.
    """

    def __init__(self) -> None:
        self._last_seq = 0
        self._digest = SampleDigest()
        self._launched: deque[Launched] = deque()
        """Launched steps whose tokens are not yet in the digest."""

    def check(self, plan: Plan) -> None:
        """Checks that `plan` is the next one, and that its digest, if any, equals this rank's.

        Raises:
            OutOfStep: either check fails.
        """
        if plan.seq != self._last_seq + 1:
            raise OutOfStep(f"Plan {plan.seq} arrived after Plan {self._last_seq}: a Plan was lost")
        self._last_seq = plan.seq
        while self._launched and self._launched[0].seq <= plan.digest_seq:
            self.record(self._launched.popleft().result())
        if plan.digest_seq and self._digest.value(plan.digest_seq) != plan.digest:
            raise OutOfStep(f"sampled tokens up to step {plan.digest_seq} differ from rank 0's")

    def record(self, result: StepResult) -> None:
        """Adds the tokens that this rank sampled in a step to the rank's digest."""
        self._digest.update(result.seq, result.token_ids)

    def follow(self, step: Launched) -> None:
        """Queues a launched step, whose tokens are added to the digest later; waits for all steps
        except the newest."""
        self._launched.append(step)
        while len(self._launched) > RUN_AHEAD:
            self.record(self._launched.popleft().result())
