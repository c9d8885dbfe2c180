"""Step watchdog: tells a rank group that hangs from one that is slow."""

from __future__ import annotations

from collections.abc import Callable

from worker.front.rank_processes import Glance
from worker.protocol.messages import StepLimit, StepReport

BUSY_FACTOR = 10.0
"""Multiple of a step's limit that ranks get which are at work all the time: on a loaded machine,
with a compiler, or in an endless loop."""


class StepWatchdog:
    """Watches the reports of one rank group's engine.

    Rank 0 answers each submit with a report, which tells whether another one is due. If that does
    not come within the limit of a step, a rank hangs, unless ranks are seen at work: they are then
    slow, and get `BUSY_FACTOR` times as long. A rank that was stopped by a signal hangs after the
    timeout, whatever the limit of its step.

    Args:
        timeout_s: least limit of a step, in seconds; 0 for no limit.
        glance: looks at the rank group's processes.
    """

    def __init__(self, timeout_s: float, glance: Callable[[], Glance]) -> None:
        self._timeout_s = timeout_s
        self._glance = glance
        self._handed = 0
        """Ordinal of the last submit that rank 0 was sent."""
        self._awaits = False
        """Whether a report is due."""
        self._waited_s = 0.0
        """Seconds since the last report, or since one is due."""
        self._asleep_s = 0.0
        """Seconds in which no rank was seen at work."""
        self._cpu_ns = -1
        """CPU time of the ranks at the last glance, in nanoseconds."""
        self._limits: dict[int, float] = {}
        """Limits, in seconds, of steps that may exceed the timeout, by number."""

    def handed(self, ordinal: int) -> None:
        """Notes that rank 0 was sent submits, the last of which has this ordinal."""
        self._handed = ordinal
        if not self._awaits:
            self._awaits = True
            self._waited_s = self._asleep_s = 0.0

    def allow(self, limit: StepLimit) -> None:
        """Notes the limit of a step that may exceed the timeout."""
        self._limits[limit.seq] = limit.seconds

    def reported(self, report: StepReport) -> None:
        """Notes that a report has come."""
        self._waited_s = self._asleep_s = 0.0
        self._awaits = report.more or report.load.num_submits_seen < self._handed
        done = report.load.step_shape.seq
        if self._limits:
            self._limits = {seq: s for seq, s in self._limits.items() if seq > done}

    def tick(self, elapsed_s: float) -> str | None:
        """Notes that time has passed; returns the problem if the group hangs."""
        if not (self._awaits and self._timeout_s):
            return None
        self._waited_s += elapsed_s
        if self._waited_s <= self._timeout_s / 2:
            return None
        glance = self._glance()
        is_idle = not glance.at_work and glance.cpu_ns == self._cpu_ns
        self._asleep_s = self._asleep_s + elapsed_s if is_idle else 0.0
        self._cpu_ns = glance.cpu_ns
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
