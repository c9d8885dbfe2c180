"""Step watchdog: distinguishes hung rank groups from slow ones."""

from __future__ import annotations

from collections.abc import Callable

from worker.frontend.rank_processes import ProcessSnapshot
from worker.protocol.messages import StepLimit, StepReport

BUSY_FACTOR = 10.0
"""Multiple of a step's limit that is allowed for ranks that are always active: on a loaded machine,
in a compiler, or in an endless loop."""


class StepWatchdog:
    """Monitors the reports of one rank group's engine.

    Rank 0 answers each submit with a report, which states whether another one will follow. If a
    report that is due does not arrive within the limit of a step, a rank counts as hung. Active
    ranks are considered slow rather than hung: for them, the limit is `BUSY_FACTOR` times as long.
    A rank that was stopped by a signal counts as hung after the timeout, regardless of the limit of
    its step.

    Args:
        timeout_s: minimum limit of a step in seconds; 0 for no limit.
        snapshot: returns the state of the rank group's processes.
    """

    def __init__(self, timeout_s: float, snapshot: Callable[[], ProcessSnapshot]) -> None:
        self._timeout_s = timeout_s
        self._snapshot = snapshot
        self._last_ordinal = 0
        """Ordinal of the last submit sent to rank 0."""
        self._awaits = False
        """Whether a report is due."""
        self._waited_s = 0.0
        """Time since the last report, or since a report became due, in seconds."""
        self._asleep_s = 0.0
        """Time for which no rank has been active, up to the last check, in seconds."""
        self._cpu_ns = -1
        """`ProcessSnapshot.cpu_ns` at the last check."""
        self._limits: dict[int, float] = {}
        """Limits of steps that may exceed the timeout, in seconds, by step number."""

    def submits_sent(self, ordinal: int) -> None:
        """Records that submits were sent to rank 0, the last of which has ordinal `ordinal`."""
        self._last_ordinal = ordinal
        if not self._awaits:
            self._awaits = True
            self._waited_s = self._asleep_s = 0.0

    def allow(self, limit: StepLimit) -> None:
        """Records the limit of a step that may exceed the timeout."""
        self._limits[limit.seq] = limit.seconds

    def report_received(self, report: StepReport) -> None:
        """Records that a report was received."""
        self._waited_s = self._asleep_s = 0.0
        self._awaits = report.more or report.load.num_submits_seen < self._last_ordinal
        done = report.load.step_shape.seq
        if self._limits:
            self._limits = {seq: s for seq, s in self._limits.items() if seq > done}

    def tick(self, elapsed_s: float) -> str | None:
        """Advances the time by `elapsed_s` seconds; returns the problem if the group is hung,
        otherwise None."""
        if not (self._awaits and self._timeout_s):
            return None
        self._waited_s += elapsed_s
        if self._waited_s <= self._timeout_s / 2:
            return None
        snapshot = self._snapshot()
        is_idle = not snapshot.is_active and snapshot.cpu_ns == self._cpu_ns
        self._asleep_s = self._asleep_s + elapsed_s if is_idle else 0.0
        self._cpu_ns = snapshot.cpu_ns
        return self._verdict(snapshot)

    def _verdict(self, snapshot: ProcessSnapshot) -> str | None:
        waited_s = self._waited_s
        limit_s = max([self._timeout_s, *self._limits.values()])
        problem = None
        if snapshot.stopped and waited_s > self._timeout_s:
            problem = ", ".join(snapshot.stopped)
        elif waited_s > limit_s and self._asleep_s >= self._timeout_s / 4:
            problem = "no rank is active"
        elif waited_s > BUSY_FACTOR * limit_s:
            problem = "ranks are active but do not finish"
        if problem is None:
            return None
        return f"engine hung: no step for {waited_s:.0f} s, {problem}"
