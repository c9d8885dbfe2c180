"""GapHistogram: histogram of the pauses between a session's requests, from which its live time
is estimated."""

from __future__ import annotations

import math
from itertools import accumulate

QUANTILE = 0.95
"""Quantile of a session's gaps that determines how long it counts as live after a request."""
MIN_LIVE_S = 15.0
"""Minimum seconds for which a session counts as live after a request."""
MAX_LIVE_S = 60.0
"""Maximum seconds for which a session counts as live after a request. Half of the turns of
interactive Claude Code come within 10 s, and 86 % within 60 s (kv-cache-tester, 82 sessions). In
simulations, live times of 15 s and of 60 s gave the same results."""
FIRST_LIVE_S = 15.0
"""Seconds for which a session counts as live before any gap is known."""
_SHORTEST_S = 0.5
_PER_OCTAVE = 2
_NUM_BUCKETS = 22
"""Number of buckets, each half an octave wide; the last one starts at 512 s."""
_LAST = _NUM_BUCKETS - 1
_MOST = 0.9
_SHARED_WEIGHT = 8.0
"""Maximum weight of the gaps of all sessions: together they count as much as this many of the
session's own gaps."""
_MAX_COUNT = 4096.0
"""Sum of counts at which all counts are halved, so that the histogram adapts to changes in load."""


class GapHistogram:
    """Histogram of seconds between the end of a session's request and its next request."""

    __slots__ = ("_counts", "total")

    def __init__(self) -> None:
        self._counts = [0.0] * _NUM_BUCKETS
        self.total = 0.0
        """Number of gaps; older ones count less."""

    def add(self, seconds: float) -> None:
        """Adds a gap."""
        self._counts[_bucket(seconds)] += 1.0
        self.total += 1.0
        if self.total >= _MAX_COUNT:
            self._counts = [0.5 * count for count in self._counts]
            self.total *= 0.5

    @property
    def is_mostly_short(self) -> bool:
        """Whether 90 % of the gaps are within MAX_LIVE_S, rounded down to a bucket's bound."""
        short = sum(self._counts[: _bucket(MAX_LIVE_S)])
        return short >= _MOST * self.total

    def live_s(self, shared: GapHistogram) -> float:
        """Seconds for which a session counts as live after its last request has ended.

        Args:
            shared: gaps of all sessions, used while the session itself has few.
        """
        weight = min(_SHARED_WEIGHT / shared.total, 1.0) if shared.total else 0.0
        total = self.total + weight * shared.total
        if not total:
            return FIRST_LIVE_S
        pairs = zip(self._counts, shared._counts, strict=True)
        reached = accumulate(observed + weight * other for observed, other in pairs)
        place = next((n for n, count in enumerate(reached) if count >= QUANTILE * total), _LAST)
        seconds = _SHORTEST_S * float(2.0 ** (place / _PER_OCTAVE))
        return min(max(seconds, MIN_LIVE_S), MAX_LIVE_S)


def _bucket(seconds: float) -> int:
    if seconds <= _SHORTEST_S:
        return 0
    return min(math.ceil(_PER_OCTAVE * math.log2(seconds / _SHORTEST_S)), _LAST)
