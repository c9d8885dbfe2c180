"""Bucket: a token bucket that limits rates per minute."""

from __future__ import annotations

import math

MINUTE_S = 60.0


class Bucket:
    """A token bucket refilled at a rate per minute; a rate of 0 means no limit."""

    __slots__ = ("_at", "_left", "_per_minute")

    def __init__(self) -> None:
        self._per_minute = 0.0
        self._left = 0.0
        self._at = -math.inf

    @property
    def capacity(self) -> float:
        """Capacity of the bucket: a minute's refill, at least 1."""
        return max(1.0, self._per_minute)

    @property
    def per_minute(self) -> float:
        """Refill rate per minute."""
        return self._per_minute

    @per_minute.setter
    def per_minute(self, rate: float) -> None:
        if rate and not self._per_minute:
            self._at = -math.inf  # a new limit starts full
        self._per_minute = rate

    def left(self, now: float) -> float:
        """Current level of the bucket; may be negative."""
        grown = self._left + (now - self._at) * self._per_minute / MINUTE_S
        return min(self.capacity, grown)

    def set(self, left: float, now: float) -> None:
        """Sets the level."""
        self._left = left
        self._at = now

    def take(self, amount: float, now: float) -> None:
        """Withdraws an amount; the level may become negative."""
        if self._per_minute:
            self._left = self.left(now) - amount
            self._at = now

    def wait_s(self, minimum: float, now: float) -> float:
        """Seconds until the level is at least `minimum` and positive; 0 if it is already."""
        if not self._per_minute:
            return 0.0
        left = self.left(now)
        if left >= minimum and left > 0.0:
            return 0.0
        return max(1e-9, (minimum - left) * MINUTE_S / self._per_minute)
