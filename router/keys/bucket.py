"""Bucket: a token bucket, by which rates per minute are limited."""

from __future__ import annotations

import math

MINUTE_S = 60.0


class Bucket:
    """A token bucket that is refilled at a rate per minute; a rate of 0 is no limit."""

    __slots__ = ("_at", "_left", "_per_minute")

    def __init__(self) -> None:
        self._per_minute = 0.0
        self._left = 0.0
        self._at = -math.inf

    @property
    def capacity(self) -> float:
        """Size of the bucket: what is refilled in a minute, at least 1."""
        return max(1.0, self._per_minute)

    @property
    def per_minute(self) -> float:
        """Rate of refilling, per minute."""
        return self._per_minute

    @per_minute.setter
    def per_minute(self, rate: float) -> None:
        if rate and not self._per_minute:
            self._at = -math.inf  # a limit begins full
        self._per_minute = rate

    def left(self, now: float) -> float:
        """Content of the bucket; may be below 0."""
        grown = self._left + (now - self._at) * self._per_minute / MINUTE_S
        return min(self.capacity, grown)

    def set(self, left: float, now: float) -> None:
        """Sets the content."""
        self._left = left
        self._at = now

    def take(self, amount: float, now: float) -> None:
        """Takes an amount, whatever is left."""
        if self._per_minute:
            self._left = self.left(now) - amount
            self._at = now

    def wait_s(self, least: float, now: float) -> float:
        """Seconds until the content is at least `least`, and above 0; 0 if it is."""
        if not self._per_minute:
            return 0.0
        left = self.left(now)
        if left >= least and left > 0.0:
            return 0.0
        return max(1e-9, (least - left) * MINUTE_S / self._per_minute)
