"""Load shedding: which request a full queue turns away, and when to try again."""

from __future__ import annotations

from math import ceil, exp

from worker.core.cache.manager import CacheManager
from worker.core.request import Request
from worker.core.scheduler.queue import WaitingQueue
from worker.wire.messages import Rejection
from worker.wire.queue_limits import QueueLimits, queue_full

_MEMORY_S = 10.0
"""Time constant of the drain rate: an admission of so long ago counts 1/e."""
MAX_RETRY_AFTER_S = 120
"""Longest Retry-After."""


class DrainRate:
    """Rate at which requests and tokens leave the queue, with exponential forgetting."""

    def __init__(self) -> None:
        self._requests = 0.0
        self._tokens = 0.0
        self._at_s = 0.0
        self._began_s: float | None = None

    def note(self, num_tokens: int, now: float) -> None:
        """Notes that a request with `num_tokens` has left the queue to run."""
        self._fade(now)
        self._requests += 1
        self._tokens += num_tokens

    def retry_after_s(self, num_requests: int, num_tokens: int, now: float) -> int:
        """Whole seconds, 1 to MAX_RETRY_AFTER_S, in which so many should have left the queue."""
        if self._began_s is None:
            return 1  # nothing has been admitted yet: the worker has just begun
        self._fade(now)
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


class LoadShedder:
    """Turns away an arrival, or the least urgent waiting request where the arrival is more urgent.

    Among equally urgent requests of several tenants, one of the tenant with most requests gives way
    to a tenant that has fewer. A request that has run already is not turned away.

    Args:
        limits: bounds of the queue.
        queue: the queue.
        cache: tells the number of free slots.
        drain: tells how fast the queue drains.
    """

    def __init__(
        self, limits: QueueLimits, queue: WaitingQueue, cache: CacheManager, drain: DrainRate
    ) -> None:
        self._limits = limits
        self._queue = queue
        self._cache = cache
        self._drain = drain

    def loser(self, arrival: Request) -> Request | None:
        """The request to turn away if `arrival` is to be queued; None if there is room."""
        if self._has_room(arrival, None):
            return None
        least = self._queue.least_urgent()
        if least is None or not self._outranks(arrival, least):
            return arrival
        return least if self._has_room(arrival, least) else arrival

    def rejection(self, request: Request, now: float) -> Rejection:
        """The 429 for a request that is turned away."""
        return queue_full(
            request.request_id,
            request.attempt,
            num_waiting=len(self._queue),
            num_tokens=self._queue.num_tokens,
            retry_after_s=self.retry_after_s(now),
        )

    def retry_after_s(self, now: float) -> int:
        """Seconds in which the present queue should have drained; 0 where it is empty."""
        num_requests = len(self._queue)
        if not num_requests:
            return 0
        return self._drain.retry_after_s(num_requests, self._queue.num_tokens, now)

    def _has_room(self, arrival: Request, leaving: Request | None) -> bool:
        return self._limits.has_room(
            len(self._queue) - (leaving is not None),
            self._queue.num_tokens - (len(leaving.token_ids) if leaving else 0),
            num_free_slots=self._cache.num_free_slots,
            num_new_tokens=len(arrival.token_ids),
        )

    def _outranks(self, arrival: Request, least: Request) -> bool:
        if arrival.priority != least.level:
            return arrival.priority > least.level
        if arrival.tenant == least.tenant:
            return False
        mine = self._queue.num_waiting(arrival.tenant, least.level)
        return mine + 1 < self._queue.num_waiting(least.tenant, least.level)
