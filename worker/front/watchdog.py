"""Tells a rank group that hangs from one that is slow."""

from __future__ import annotations

from collections.abc import Callable

from worker.front.rank_processes import Glance
from worker.wire.messages import StepLimit, StepReport

BUSY_FACTOR = 10.0
"""Times a step's limit, for ranks that are at work all the while: a loaded machine, a compiler, or
a loop without an end."""


class StepWatchdog:
    """Waits for the engine's reports; lives as long as one rank group.

    Rank 0 answers each submit with a report, and says with each whether another one is due. One
    that stays away for longer than a step may take means that a rank hangs, unless ranks are seen
    at work: then they are slow, which may take `BUSY_FACTOR` times as long. A rank that was stopped
    computes nothing, whatever it is about: there the timeout counts alone.

    Args:
        timeout_s: what a step may take at least; 0 for any time.
        glance: looks at the rank group's processes.
    """

    def __init__(self, timeout_s: float, glance: Callable[[], Glance]) -> None:
        self._timeout_s = timeout_s
        self._glance = glance
        self._handed = 0
        """Submits that rank 0 was sent."""
        self._awaits = False
        """Whether a report is due."""
        self._waited_s = 0.0
        self._asleep_s = 0.0
        """For how long none has been seen at work."""
        self._ticks = -1
        self._limits: dict[int, float] = {}
        """Of steps that may take longer, by number."""

    def handed(self, ordinal: int) -> None:
        """Rank 0 was sent submits, of which this is the last."""
        self._handed = ordinal
        if not self._awaits:
            self._awaits = True
            self._waited_s = self._asleep_s = 0.0

    def allow(self, limit: StepLimit) -> None:
        """A step may take longer than the timeout."""
        self._limits[limit.seq] = limit.seconds

    def reported(self, report: StepReport) -> None:
        """A report has come."""
        self._waited_s = self._asleep_s = 0.0
        self._awaits = report.more or report.load.num_submits_seen < self._handed
        done = report.load.step_shape.seq
        if self._limits:
            self._limits = {seq: s for seq, s in self._limits.items() if seq > done}

    def tick(self, elapsed_s: float) -> str | None:
        """Time has passed; what is wrong if the group hangs."""
        if not (self._awaits and self._timeout_s):
            return None
        self._waited_s += elapsed_s
        if self._waited_s <= self._timeout_s / 2:
            return None
        glance = self._glance()
        is_idle = not glance.at_work and glance.cpu_ticks == self._ticks
        self._asleep_s = self._asleep_s + elapsed_s if is_idle else 0.0
        self._ticks = glance.cpu_ticks
        return self._verdict(glance)

    def _verdict(self, glance: Glance) -> str | None:
        waited_s = self._waited_s
        limit_s = max([self._timeout_s, *self._limits.values()])
        problem = None
        if glance.stopped and waited_s > self._timeout_s:
            problem = ", ".join(glance.stopped)
        elif waited_s > limit_s and self._asleep_s >= self._timeout_s / 4:
            problem = "no rank is at work"
        elif waited_s > BUSY_FACTOR * limit_s:
            problem = "ranks are at work, without end"
        if problem is None:
            return None
        return f"the engine hangs, {waited_s:.0f} s without a step: {problem}"
