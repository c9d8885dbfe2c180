"""Workers that are starting, and how long a start takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

SHORT_S = 30.0
"""Seconds of a short start, and of one until the first has been measured: `rayfleet serve` takes 25
to 57 s with a small model on a node that is there, Ray included."""
_KEPT = 8
"""Starts that are remembered. Enough for one odd one not to move their median, few enough to
follow another image, model or kind of node within one scale-up."""
_OVERDUE = 3.0
"""Times the usual start-up time after which a start counts as stuck: what RFC 6298 (section 2.2)
allows a first round trip, its mean and four times the deviation that one measurement suggests."""
_STUCK_S = 600.0
"""Seconds after which a start is stuck while none has been measured, as Kubernetes has it."""


@dataclass(slots=True)
class _Start:
    since: float
    seen: bool
    """Whether it began while we looked."""


class StartTimes:
    """Follows the workers that are wanted and do not run yet.

    Who takes a worker's place when it died starts, too. Starts are told apart by when they began
    alone: whoever gets ready is taken to be the oldest that is not overdue.
    """

    def __init__(self) -> None:
        self.usual_s = SHORT_S
        """Start-up time: the lower median of the last starts, and of those under way that have
        taken longer already. Until one has been measured, the longest that any was seen
        under way, and no less than a short one."""
        self._starts: list[_Start] = []
        """Oldest first."""
        self._took: deque[float] = deque(maxlen=_KEPT)
        self._newest_ready = -inf
        """When the newest of the workers that got ready was asked for."""
        self._running: int | None = None
        self._now = 0.0

    def observe(self, target: int, running: int, now: float) -> None:
        """Looks at so many workers that are wanted, of which so many run."""
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
        """Stuck starts that others are to be started for.

        Where workers that were asked for no earlier have got ready, it is the start that fails. In
        a cluster that is full none gets ready: there only one more is tried.
        """
        stuck = [start.since for start in self._starts if self._stuck(start)]
        alone = sum(since <= self._newest_ready for since in stuck)
        return alone + (len(stuck) > alone)

    def remaining_s(self) -> list[float]:
        """Seconds until each start that is not stuck should be over, soonest first."""
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
    """The lower one of an even number."""
    return sorted(values)[(len(values) - 1) // 2]
