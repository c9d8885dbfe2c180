"""Utilisation: smoothed fraction of time that each worker spends on prefills."""

from __future__ import annotations

from math import exp

import numpy as np

from router.fleet.constants import UNKNOWN_S, WINDOW_S
from router.fleet.workers import Floats, grown

# Arrays: numpy converts any other number on each use.
_WINDOW, _ONE = np.array(WINDOW_S), np.array(1.0)


class Utilisation:
    """Exponential moving averages of the fraction of time that each worker spends on prefills.

    The time constant is WINDOW_S. Workers are identified by their rows in the WorkerTable. Reading
    the averages does not change them.
    """

    def __init__(self) -> None:
        # Arrays by row.
        self._busy_s = np.zeros(0)
        """Seconds spent on prefills, decaying with WINDOW_S, as of `_at`."""
        self._seen_s = np.zeros(0)
        """Seconds observed, busy or idle, with the same decay: WINDOW_S in the long run."""
        self._at = np.zeros(0)
        """Time of the last report, on the fleet's clock."""

    def begin(self, row: int, now: float) -> None:
        """Initializes a new worker's average to 1/2, with the weight of UNKNOWN_S."""
        self._grow(row + 1)
        self._busy_s[row], self._seen_s[row], self._at[row] = UNKNOWN_S / 2.0, UNKNOWN_S, now

    def add(self, row: int, busy_s: float, now: float) -> None:
        """Adds the seconds that a worker has spent on prefills in a step."""
        kept = exp((self._at.item(row) - now) / WINDOW_S)
        self._busy_s[row] = self._busy_s.item(row) * kept + busy_s
        self._seen_s[row] = WINDOW_S + (self._seen_s.item(row) - WINDOW_S) * kept
        self._at[row] = now

    def of_workers(self, size: int, now: float) -> Floats:
        """Utilization of each of the first `size` rows, 0 to 1; rows without a worker tend to 0."""
        known = min(size, len(self._at))
        kept = self._at[:known] - now
        kept /= _WINDOW
        np.exp(kept, out=kept)
        seen_s = self._seen_s[:known] - _WINDOW
        seen_s *= kept
        seen_s += _WINDOW
        kept *= self._busy_s[:known]
        kept /= seen_s
        parts = np.zeros(size)
        np.minimum(kept, _ONE, out=parts[:known])
        return parts

    def _grow(self, size: int) -> None:
        if size > len(self._at):
            size = max(size, 2 * len(self._at))
            self._busy_s = grown(self._busy_s, size)
            self._seen_s = grown(self._seen_s, size, WINDOW_S)
            self._at = grown(self._at, size)
