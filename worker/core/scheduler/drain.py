"""How fast the queue drains, and hence when it is worth to come again."""

from __future__ import annotations

from math import ceil, exp

_MEMORY_S = 10.0
"""What was admitted so long ago counts 1/e."""
MAX_RETRY_AFTER_S = 120


class DrainRate:
    """Requests and tokens that left the queue, with what is long ago fading."""

    def __init__(self) -> None:
        self._requests = 0.0
        self._tokens = 0.0
        self._at_s = 0.0
        self._began_s: float | None = None

    def note(self, num_tokens: int, now: float) -> None:
        """A request left the queue to run."""
        self._fade(now)
        self._requests += 1
        self._tokens += num_tokens

    def retry_after_s(self, num_requests: int, num_tokens: int, now: float) -> int:
        """Whole seconds, at least 1, in which so many should have left."""
        self._fade(now)
        if self._began_s is None:
            return 1  # nothing has been admitted yet: the worker has just begun
        # The sums are rates times this, which is less than the memory at the beginning.
        span = _MEMORY_S * (1.0 - exp(-(now - self._began_s) / _MEMORY_S))
        longest = max(
            num_requests / max(self._requests, 1e-9), num_tokens / max(self._tokens, 1e-9)
        )
        return min(max(ceil(longest * span), 1), MAX_RETRY_AFTER_S)

    def _fade(self, now: float) -> None:
        if self._began_s is None:
            self._began_s = now
        else:
            factor = exp((self._at_s - now) / _MEMORY_S)
            self._requests *= factor
            self._tokens *= factor
        self._at_s = now
