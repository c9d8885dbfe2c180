"""Timeline of steps: phases of the coordinator and of rank 0, including the times at which rank 0
is idle.

    coordinator   schedule │ broadcast │ collect (waits) │ process │ deliver │ schedule …
    rank 0                    bubble │ prepare │ forward │ sample │ bubble │ prepare …

On CUDA, the lower row is rank 0's device, and launching is part of the coordinator's `broadcast`.

Each row adds up to the wall time of a busy period. At depth 1, the coordinator works on the next
step while the rank runs the current one, and the bubble shrinks to the time of a message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from worker.plan.plan import RankTimes, StepResult
from worker.protocol.times import StepTimes

RING_SIZE = 256
"""Number of recent steps whose records are kept."""


class StepRecord(NamedTuple):
    """Times of the events of one step, in order, in seconds of the host's monotonic clock."""

    seq: int
    num_tokens: int
    scheduling: float
    """Time at which the coordinator starts to schedule the step."""
    scheduled: float
    launched: float
    """Time at which the Plan has been sent and, on CUDA, launched on rank 0's device."""
    rank: RankTimes
    awaited: float
    """Time at which the coordinator starts to wait for the result."""
    collected: float
    processed: float
    """Time at which the result has been applied and the report created."""
    bubble: float
    """Time that rank 0 idled between the previous step and this one, in seconds; 0 if there was no
    work."""


class _Launch(NamedTuple):
    num_tokens: int
    scheduling: float
    scheduled: float
    launched: float


class _Collected(NamedTuple):
    result: StepResult
    awaited: float
    collected: float


class Timeline:
    """Records the phases of every step, which takes a few microseconds per step.

    Args:
        clock: CLOCK_MONOTONIC in seconds (`time.monotonic`), which is the same for all processes of
            a host, since the rank's times are compared with the coordinator's.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.now = clock
        self.records: deque[StepRecord] = deque(maxlen=RING_SIZE)
        """Last completed steps, oldest first."""
        self._totals = StepTimes()
        self._launches: deque[_Launch] = deque()
        self._collected: _Collected | None = None
        """Result that is being processed; None if there is none."""
        self._entered = 0.0
        self._left: float | None = None
        """Time at which the coordinator last stopped working for the engine; None if it has been
        idle since."""
        self._rank_finished: float | None = None

    def totals(self) -> StepTimes:
        """Total times of all steps so far."""
        return msgspec.structs.replace(self._totals)

    def enter(self) -> None:
        """Records that the coordinator starts working for the engine."""
        now = self._entered = self.now()
        if self._left is not None:
            self._totals.deliver += now - self._left
            self._left = None

    def launched(self, num_tokens: int, scheduled: float) -> None:
        """Records that a Plan, whose scheduling ended at `scheduled`, has just been sent."""
        self._launches.append(_Launch(num_tokens, self._entered, scheduled, self.now()))

    def collected(self, result: StepResult, awaited: float) -> None:
        """Records that the oldest step's result, awaited since `awaited`, has just been
        received."""
        self._collected = _Collected(result, awaited, self.now())

    def leave(self, *, idle: bool) -> None:
        """Records that the coordinator stops working for the engine, after processing the collected
        result. `idle` is set if there is no work left."""
        now = self.now()
        if self._collected is not None:
            self._add(*self._collected, now)
            self._collected = None
        self._left = None if idle else now
        if idle:
            self._rank_finished = None

    def _add(self, result: StepResult, awaited: float, collected: float, processed: float) -> None:
        """Adds the oldest step to the totals and records, if `result` has the times that rank 0
        measured."""
        launch, rank = self._launches.popleft(), result.times
        if rank is None:
            return
        sent = launch.launched
        if rank.finished <= launch.launched:  # the step ran within its launch: rank time
            sent = min(sent, max(launch.scheduled, rank.started))
        bubble = 0.0
        if self._rank_finished is not None:
            bubble = rank.started - self._rank_finished
        self._rank_finished = rank.finished
        totals = self._totals
        totals.num_steps += 1
        totals.schedule += launch.scheduled - launch.scheduling
        totals.broadcast += sent - launch.scheduled
        totals.prepare += rank.prepared - rank.started
        totals.forward += rank.forwarded - rank.prepared
        totals.sample += rank.finished - rank.forwarded
        totals.collect += collected - awaited
        totals.process += processed - collected
        totals.bubble += bubble
        self.records.append(
            StepRecord(result.seq, *launch, rank, awaited, collected, processed, bubble)
        )
