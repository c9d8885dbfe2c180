"""How popular prefixes are: how often each is asked for again, and its part of all requests."""

from __future__ import annotations

from math import exp
from typing import NamedTuple

from router.fleet.constants import BURST_S, UNKNOWN_S, WINDOW_S

_MAX_KNOWN = 8192
"""Prefixes that are remembered, about 1 MB."""


class _Count(NamedTuple):
    """Recurrences, older ones weighing less."""

    value: float
    at: float
    """Seconds of the fleet's clock at which they were so many."""
    earlier: float = 0.0
    """Recurrences of all prefixes that had come before the first of this one, as counted then."""
    since: float = 0.0
    """Seconds of the fleet's clock at which the first of this one came."""

    def value_after(self, now: float) -> float:
        """The `value` with a further use at this time; what belongs to the same burst is none."""
        if now - self.at < BURST_S:
            return self.value
        return self.value * exp((self.at - now) / WINDOW_S) + 1.0

    def after(self, now: float) -> _Count:
        """The record with a further use at this time; what belongs to the same burst is none."""
        if now - self.at < BURST_S:
            return self
        return _Count(self.value_after(now), now, self.earlier, self.since)


class Recurrence(NamedTuple):
    """How often one prefix came back."""

    times: float
    """How often it was asked for lately, which is also how often it may be expected to be again;
    0 where that was all at once."""
    share: float
    """The prefix's part of all that came lately, 0 to 1."""


class PrefixPopularity:
    """Counts recurrences of prefixes, by the hashes of the blocks that they end with.

    A prefix's part is one of what came since it was first seen, and of UNKNOWN_S before: what came
    earlier tells nothing of it, or the first copies of a prefix that suddenly everybody asks for
    would be made one by one, over WINDOW_S, while other workers idle. The time before keeps a burst
    that is read over a tenth of a second from looking like all of the traffic. Reading changes
    nothing.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Count] = {}
        """The least recently observed first."""
        self._all = _Count(0.0, 0.0)

    def observe(self, block_hash: int, now: float) -> None:
        """A request that shares the prefix was placed."""
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
        """The prefix as of now, with the request that asks."""
        known = self._known.get(block_hash)
        if known is None or not (value := known.value_after(now)):
            return Recurrence(0.0, 0.0)  # unknown, or all so far are one burst
        earlier = known.earlier * exp((known.since - now) / WINDOW_S)
        compared = self._all.value_after(now) - earlier * (1.0 - UNKNOWN_S / WINDOW_S)
        return Recurrence(value + 1.0, min((value + 1.0) / max(compared, 1.0), 1.0))
