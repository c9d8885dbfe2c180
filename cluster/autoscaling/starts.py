"""Workers that are starting, and the time that a start takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

SHORT_S = 30.0
"""Seconds of a short start, which every start is taken to be until one has been measured:
`rayfleet serve` takes 25 to 57 s with a small model on a running node, Ray's start included."""
_KEPT = 8
"""Measured starts that are kept: enough that one outlier does not move their median, and few enough
to follow another image, model or kind of node within one scale-up."""
_OVERDUE = 3.0
"""Multiple of the usual start-up time after which a start counts as stuck: the first timeout of RFC
6298 (section 2.2), the mean and four times a deviation that is taken to be half of it."""
_STUCK_S = 600.0
"""Seconds after which a start counts as stuck while none has been measured: the default
progressDeadlineSeconds of a Kubernetes Deployment."""


@dataclass(slots=True)
class _Start:
    since: float
    """Time at which the start was first observed."""
    seen: bool
    """Whether the start began between two observations; its length is known then."""


class StartTimes:
    """Starts of workers: those under way, and the usual start-up time by those that are over.

    A start is a worker of the target that does not run, the replacement of a dead one included.
    Only numbers of workers are known: one that begins to run is taken to be the oldest start that
    is not stuck.
    """

    def __init__(self) -> None:
        self.usual_s = SHORT_S
        """Usual start-up time in seconds: the lower median of the last measured starts and of those
        under way that have already taken longer than that median. Until one has been measured: the
        longest that any has been under way without being stuck, at least SHORT_S."""
        self._starts: list[_Start] = []
        """Starts under way, oldest first."""
        self._took: deque[float] = deque(maxlen=_KEPT)
        """Seconds of the last measured starts."""
        self._newest_ready = -inf
        """Time at which the start began that is the newest of those that are over."""
        self._running: int | None = None
        self._now = 0.0
        """Time of the last observation."""

    def observe(self, target: int, running: int, now: float) -> None:
        """Updates the starts by the target number of workers and the number that run."""
        self._now = now
        first, self._running = self._running, running
        for _ in range(running - first if first is not None else 0):
            self._got_ready()
        missing = max(target - running, 0)
        del self._starts[missing:]
        new = missing - len(self._starts)
        self._starts += [_Start(now, first is not None) for _ in range(new)]
        self.usual_s = self._usual_s()

    @property
    def num_lost(self) -> int:
        """Number of stuck starts that others should replace.

        A start that a newer one has overtaken is stuck by itself: it is replaced. Stuck starts that
        none has overtaken may lack a free node, as in a full cluster: one of them is replaced.
        """
        stuck = [start.since for start in self._starts if self._stuck(start)]
        alone = sum(since <= self._newest_ready for since in stuck)
        return alone + (len(stuck) > alone)

    def remaining_s(self) -> list[float]:
        """Expected seconds left of each start that is not stuck, shortest first."""
        usual = self.usual_s
        return [
            max(start.since + usual - self._now, 0.0)
            for start in self._starts
            if not self._stuck(start)
        ]

    def _got_ready(self) -> None:
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
    """The median; of an even number of values the lower of the middle two."""
    return sorted(values)[(len(values) - 1) // 2]
