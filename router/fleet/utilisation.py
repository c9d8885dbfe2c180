"""How busy a fleet is with prompts, smoothed."""

from __future__ import annotations

from math import exp

_FIRST_S = 2.0
"""An idle time of so long stands before the first report, so that one step makes no busy fleet."""


class Utilisation:
    """Seconds spent on prompts per second of all workers, older ones weighing less.

    Args:
        window_s: time after which a report weighs 1/e.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._busy_s = 0.0
        self._wall_s = _FIRST_S
        self._at: float | None = None
        self._num_workers = 0

    def set_num_workers(self, count: int, now: float) -> None:
        """How many workers share the load from now on."""
        self._advance(now)
        self._num_workers = count

    @property
    def num_workers(self) -> int:
        """How many workers share the load."""
        return self._num_workers

    def add(self, busy_s: float, now: float) -> None:
        """A worker spent so long on prompts."""
        self._advance(now)
        self._busy_s += busy_s

    def at(self, now: float) -> float:
        """The utilisation, 0 to 1."""
        self._advance(now)
        return min(self._busy_s / self._wall_s, 1.0)

    def _advance(self, now: float) -> None:
        if self._at is None:
            self._at = now
        passed = now - self._at
        if passed <= 0.0:
            return
        kept = exp(-passed / self._window_s)
        self._busy_s *= kept
        self._wall_s = self._wall_s * kept + passed * max(self._num_workers, 1)
        self._at = now
