"""How busy a fleet is with prompts, smoothed."""

from __future__ import annotations

from math import exp

import numpy as np

from router.fleet.workers import Floats

_FIRST_S = 2.0
"""An idle time of so long stands before the first report, so that one step makes no busy fleet."""
_LEAST = 1e-9
"""Older reports that weigh less are forgotten."""


class Utilisation:
    """Seconds spent on prompts per second of all workers, older ones weighing less.

    Workers are distinguished by their rows in the WorkerTable.

    Args:
        window_s: time after which a report weighs 1/e.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._busy_s = 0.0
        self._wall_s = _FIRST_S
        self._at: float | None = None
        self._num_workers = 0
        self._rows = np.zeros(0)
        """By row, seconds spent, older ones weighing as much as they did ..."""
        self._weight = 1.0
        """... but all of them so much now: no report touches all rows."""

    def set_num_workers(self, count: int, now: float) -> None:
        """How many workers share the load from now on."""
        self._advance(now)
        self._num_workers = count

    @property
    def num_workers(self) -> int:
        """How many workers share the load."""
        return self._num_workers

    def add(self, row: int, busy_s: float, now: float) -> None:
        """A worker spent so long on prompts."""
        self._advance(now)
        self._busy_s += busy_s
        self._grow(row + 1)
        self._rows[row] += busy_s / self._weight

    def forget(self, row: int) -> None:
        """The row is to be another worker's."""
        if row < len(self._rows):
            self._rows[row] = 0.0

    def at(self, now: float) -> float:
        """The utilisation, 0 to 1."""
        self._advance(now)
        return min(self._busy_s / self._wall_s, 1.0)

    def of_workers(self, size: int, now: float) -> Floats:
        """The utilisation of each of the first `size` rows; those that are new seem idle."""
        self._advance(now)
        self._grow(size)
        shares: Floats = self._rows[:size] * (
            self._weight * max(self._num_workers, 1) / self._wall_s
        )
        return shares

    def _advance(self, now: float) -> None:
        if self._at is None:
            self._at = now
        passed = now - self._at
        if passed <= 0.0:
            return
        kept = exp(-passed / self._window_s)
        self._busy_s *= kept
        wall_s = self._window_s * max(self._num_workers, 1)
        self._wall_s = wall_s + (self._wall_s - wall_s) * kept
        self._weight *= kept
        if self._weight < _LEAST:
            self._rows *= self._weight
            self._weight = 1.0
        self._at = now

    def _grow(self, size: int) -> None:
        if size > len(self._rows):
            more = max(size - len(self._rows), len(self._rows))
            self._rows = np.concatenate([self._rows, np.zeros(more)])
