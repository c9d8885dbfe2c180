"""How popular prefixes are: how often each is asked for again, and its part of all requests."""

from __future__ import annotations

from math import exp
from typing import NamedTuple

_WINDOW_S = 10.0
"""Time after which a recurrence weighs 1/e."""
_APART_S = 0.005
"""What comes within so long is one burst, and a burst says nothing of what comes after it."""
_MAX_KNOWN = 8192


class Recurrence(NamedTuple):
    """How often one prefix came back."""

    times: float
    """How often it was asked for lately, which is also how often it may be expected to be again;
    0 where that was all at once."""
    share: float
    """Its part of all that came lately."""


class PrefixPopularity:
    """Counts recurrences of prefixes, older ones weighing less."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, float]] = {}
        """By block hash, the least recently counted first: the count, and when it was made."""
        self._all: tuple[float, float] = (0.0, 0.0)

    def take(self, block_hash: int, now: float) -> Recurrence:
        """A request shares the prefix that ends with this block; what is known of that one."""
        self._all = _counted(self._all, now)
        known = self._known.pop(block_hash, None)
        if known is None:
            if len(self._known) >= _MAX_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[block_hash] = (0.0, now)
            return Recurrence(0.0, 0.0)
        counted = self._known[block_hash] = _counted(known, now)
        if not counted[0]:
            return Recurrence(0.0, 0.0)  # all so far are one burst
        return Recurrence(counted[0] + 1.0, min((counted[0] + 1.0) / max(self._all[0], 1.0), 1.0))


def _counted(known: tuple[float, float], now: float) -> tuple[float, float]:
    value, at = known
    if now - at < _APART_S:
        return known
    return value * exp((at - now) / _WINDOW_S) + 1.0, now
