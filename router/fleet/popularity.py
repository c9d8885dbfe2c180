"""How popular prefixes are: how often each is asked for again, and its part of all requests."""

from __future__ import annotations

from math import exp
from typing import NamedTuple

from router.fleet.constants import BURST_S, WINDOW_S

_MAX_KNOWN = 8192
"""Prefixes that are remembered, about 1 MB."""


class _Count(NamedTuple):
    """Recurrences, older ones weighing less."""

    value: float
    at: float
    """When it was so many."""

    def after(self, now: float) -> _Count:
        """With a further one at this time; what belongs to the same burst is none."""
        if now - self.at < BURST_S:
            return self
        return _Count(self.value * exp((self.at - now) / WINDOW_S) + 1.0, now)


class Recurrence(NamedTuple):
    """How often one prefix came back."""

    times: float
    """How often it was asked for lately, which is also how often it may be expected to be again;
    0 where that was all at once."""
    share: float
    """Its part of all that came lately."""


class PrefixPopularity:
    """Counts recurrences of prefixes, by the hashes of the blocks that they end with.

    Reading changes nothing.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Count] = {}
        """The least recently observed first."""
        self._all = _Count(0.0, 0.0)

    def observe(self, block_hash: int, now: float) -> None:
        """A request that shares the prefix was placed."""
        self._all = self._all.after(now)
        known = self._known.pop(block_hash, None)
        if known is None and len(self._known) >= _MAX_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[block_hash] = _Count(0.0, now) if known is None else known.after(now)

    def recurrence(self, block_hash: int, now: float) -> Recurrence:
        """The prefix as of now, with the request that asks."""
        known = self._known.get(block_hash)
        if known is None or not (value := known.after(now).value):
            return Recurrence(0.0, 0.0)  # unknown, or all so far are one burst
        everything = self._all.after(now).value
        return Recurrence(value + 1.0, min((value + 1.0) / max(everything, 1.0), 1.0))
