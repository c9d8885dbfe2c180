"""PrefixPopularity: how often requests share a prefix, as a number and as a fraction of all
uses."""

from __future__ import annotations

from math import exp
from typing import NamedTuple

from router.fleet.constants import BURST_S, UNKNOWN_S, WINDOW_S

_MAX_KNOWN = 8192
"""Maximum number of prefixes that are counted; they take about 1 MB."""


class _Count(NamedTuple):
    """A number of uses that decays exponentially, with time constant WINDOW_S."""

    value: float
    """The decayed number at time `at`."""
    at: float
    """Time of the last use, on the fleet's clock."""
    earlier: float = 0.0
    """The decayed number of uses of all prefixes at the time when this prefix was first used."""
    since: float = 0.0
    """Time of the first use, on the fleet's clock."""

    def value_after(self, now: float) -> float:
        """`value` including a use at time `now`; uses within a burst count once."""
        if now - self.at < BURST_S:
            return self.value
        return self.value * exp((self.at - now) / WINDOW_S) + 1.0

    def after(self, now: float) -> _Count:
        """The count including a use at time `now`; uses within a burst count once."""
        if now - self.at < BURST_S:
            return self
        return _Count(self.value_after(now), now, self.earlier, self.since)


class Recurrence(NamedTuple):
    """Popularity of one prefix."""

    times: float
    """Recent number of uses, which predicts the number of future uses; 0 after a single burst."""
    share: float
    """The prefix's recent uses as a fraction of those of all prefixes, 0 to 1."""


class PrefixPopularity:
    """Counts uses of prefixes, each identified by the hash of its last block.

    A prefix's share is relative to all uses since UNKNOWN_S before the prefix was first seen.
    Relative to all uses ever, the share of a prefix that suddenly appears in every request would
    grow slowly, over WINDOW_S: the prefix would be copied to one worker after another while the
    others idle. Without UNKNOWN_S, a burst of 0.1 s would look like all of the traffic. Lookups do
    not change the counts.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Count] = {}
        """Counts by hash, least recently used first."""
        self._all = _Count(0.0, 0.0)
        """Count of the uses of all prefixes."""

    def observe(self, block_hash: int, now: float) -> None:
        """Records a placed request that shares the prefix."""
        known = self._known.pop(block_hash, None)
        if known is None:
            if len(self._known) >= _MAX_KNOWN:
                del self._known[next(iter(self._known))]
            earlier = self._all.value * exp((self._all.at - now) / WINDOW_S)
            self._known[block_hash] = _Count(0.0, now, earlier, now)
        else:
            self._known[block_hash] = known.after(now)
        self._all = self._all.after(now)

    def recurrence(self, block_hash: int, now: float) -> Recurrence:
        """Popularity of a prefix, including a request to be placed now."""
        known = self._known.get(block_hash)
        if known is None or not (value := known.value_after(now)):
            return Recurrence(0.0, 0.0)  # unknown, or all uses so far are one burst
        earlier = known.earlier * exp((known.since - now) / WINDOW_S)
        compared = self._all.value_after(now) - earlier * (1.0 - UNKNOWN_S / WINDOW_S)
        return Recurrence(value + 1.0, min((value + 1.0) / max(compared, 1.0), 1.0))
