"""IdleShare: smoothed fraction of time in which a worker has no requests."""

from __future__ import annotations

from math import exp

WINDOW_S = 30.0
"""Time constant in seconds: several turns of a session."""


class IdleShare:
    """Fraction of time in which a worker has no requests: an exponential moving average, initially
    0.

    Args:
        now: time in seconds.
    """

    __slots__ = ("_at", "_is_idle", "_share")

    def __init__(self, now: float) -> None:
        self._at = now
        self._share = 0.0
        self._is_idle = False

    def update(self, is_idle: bool, now: float) -> None:
        """Records whether the worker is idle from now on."""
        if is_idle != self._is_idle:
            self._share = self.value(now)
            self._at = now
            self._is_idle = is_idle

    def value(self, now: float) -> float:
        """The moving average of the fraction of time in which the worker is idle, 0 to 1."""
        kept = exp((self._at - now) / WINDOW_S)
        return self._share * kept + (1.0 - kept if self._is_idle else 0.0)
