"""How often prefixes are asked for again."""

from __future__ import annotations

from math import exp

_APART_S = 0.1
"""What comes within so long is one burst, and a burst says nothing of what comes after it."""
_MAX_KNOWN = 8192


class Demand:
    """Counts of recurrences, older ones weighing less.

    Args:
        window_s: time after which a recurrence weighs 1/e.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._known: dict[int, tuple[float, float]] = {}
        """By block hash, the least recently counted first: the count, and when it was made."""

    def __len__(self) -> int:
        return len(self._known)

    def count(self, block_hash: int, now: float) -> float:
        """How often the prefix that ends with this block came back, in about one window.

        The call itself counts for later ones.
        """
        known = self._known.get(block_hash)
        if known is None:
            if len(self._known) >= _MAX_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[block_hash] = (0.0, now)
            return 0.0
        value, at = known
        if now - at < _APART_S:
            return value
        value = value * exp((at - now) / self._window_s) + 1.0
        del self._known[block_hash]
        self._known[block_hash] = (value, now)
        return value
