"""Starting workers, and their startup time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

SHORT_S = 30.0
"""Assumed startup time in seconds until one has been measured: `rayfleet serve` takes 25 to 57 s
with a small model on a running node, including Ray's start."""
_HISTORY = 8
"""Number of measured starts to keep: enough to be robust against one outlier, and few enough to
adapt to another image, model or kind of node within one scale-up."""
_OVERDUE = 3.0
"""Multiple of the usual startup time after which a start counts as stuck: the first timeout of RFC
6298 (section 2.2), the mean plus four times a deviation that is assumed to be half of the mean."""
_STUCK_S = 600.0
"""Seconds after which a start counts as stuck before any has been measured: the default
progressDeadlineSeconds of a Kubernetes Deployment."""


@dataclass(slots=True)
class _Start:
    since: float
    """Time of the first observation of the start."""
    seen: bool
    """Whether the start began between observations, so that its duration is known."""


class StartTimes:
    """Workers that are starting, and the usual duration of a start.

    A start is a worker that is part of the target but not running, including replacements for
    failed workers. Only numbers of workers are known: a new running worker counts as the oldest
    start that is not stuck.
    """

    def __init__(self) -> None:
        self.usual_s = SHORT_S
        """Usual startup time in seconds: the lower median of the last measured starts and of
        current ones that have already taken longer than that median. Before the first measurement,
        it is the age of the oldest start that is not stuck, and at least SHORT_S."""
        self._starts: list[_Start] = []
        """Starts in progress, oldest first."""
        self._took: deque[float] = deque(maxlen=_HISTORY)
        """Durations of the last measured starts in seconds."""
        self._newest_ready = -inf
        """Time at which the newest completed start began."""
        self._running: int | None = None
        self._now = 0.0
        """Time of the last observation."""

    def observe(self, target: int, running: int, now: float) -> None:
        """Updates the starts from the target and the number of running workers."""
        self._now = now
        first, self._running = self._running, running
        for _ in range(running - first if first is not None else 0):
            self._complete_start()
        missing = max(target - running, 0)
        del self._starts[missing:]
        new = missing - len(self._starts)
        self._starts += [_Start(now, first is not None) for _ in range(new)]
        self.usual_s = self._usual_s()

    @property
    def num_lost(self) -> int:
        """Number of stuck starts to replace.

        A stuck start that a newer one has overtaken is replaced. Other stuck starts may be waiting
        for a free node in a full cluster: only one of them is replaced.
        """
        stuck = [start.since for start in self._starts if self._stuck(start)]
        overtaken = sum(since <= self._newest_ready for since in stuck)
        return overtaken + (len(stuck) > overtaken)

    def remaining_s(self) -> list[float]:
        """Expected remaining seconds of each start that is not stuck, shortest first."""
        usual = self.usual_s
        return [
            max(start.since + usual - self._now, 0.0)
            for start in self._starts
            if not self._stuck(start)
        ]

    def _complete_start(self) -> None:
        if not self._starts:
            return
        index = next((i for i, s in enumerate(self._starts) if not self._stuck(s)), 0)
        start = self._starts.pop(index)
        self._newest_ready = max(self._newest_ready, start.since)
        if start.seen:
            self._took.append(self._now - start.since)

    def _stuck(self, start: _Start) -> bool:
        limit_s = _OVERDUE * self.usual_s if self._took else _STUCK_S
        return self._now - start.since > limit_s

    def _usual_s(self) -> float:
        ages = [
            self._now - start.since
            for start in self._starts
            if start.seen and start.since > self._newest_ready
        ]
        if not self._took:
            return max([self.usual_s, *(age for age in ages if age <= _STUCK_S)])
        usual = _median(self._took)
        return _median([*self._took, *(age for age in ages if age > usual)])


def _median(values: Sequence[float]) -> float:
    """Lower median."""
    return sorted(values)[(len(values) - 1) // 2]
