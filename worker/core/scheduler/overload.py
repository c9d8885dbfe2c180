"""The bounded queue: who is turned away when it is full."""

from __future__ import annotations

from worker.core.cache.manager import CacheManager
from worker.core.request import Request
from worker.core.scheduler.drain import DrainRate
from worker.core.scheduler.queue import WaitingQueue
from worker.wire.messages import Rejection


class QueueLimits:
    """Turns away the arrival, or the least urgent that waits where the arrival is more urgent.

    Among equally urgent ones of several tenants, one of the tenant with most requests gives way to
    a tenant that has fewer. Requests for which there is a free slot do not count as waiting: they
    are in the queue only until the next step. Nobody is turned away who has run already.

    Args:
        max_requests: that may wait; 0 for any number.
        max_tokens: that they may have together; 0 for any number. A single request may have more.
    """

    def __init__(
        self,
        max_requests: int,
        max_tokens: int,
        queue: WaitingQueue,
        cache: CacheManager,
        drain: DrainRate,
    ) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._queue = queue
        self._cache = cache
        self._drain = drain

    def loser(self, arrival: Request) -> Request | None:
        """Who does not get a place, now that `arrival` wants one; None if there is room."""
        if self._has_room(arrival, None):
            return None
        least = self._queue.least_urgent()
        if least is None or not self._outranks(arrival, least):
            return arrival
        return least if self._has_room(arrival, least) else arrival

    def rejection(self, request: Request, now: float) -> Rejection:
        """What its client is told."""
        num_requests, num_tokens = len(self._queue), self._queue.num_tokens
        return Rejection(
            request_id=request.request_id,
            attempt=request.attempt,
            message=(
                f"{num_requests} requests with {num_tokens} tokens wait at this worker already, "
                "none of them less urgent: try again later"
            ),
            status=429,
            retry_after_s=max(self.retry_after_s(now), 1),
        )

    def retry_after_s(self, now: float) -> int:
        """Seconds in which what waits now should have left; 0 where nothing does."""
        num_requests = len(self._queue)
        if not num_requests:
            return 0
        return self._drain.retry_after_s(num_requests, self._queue.num_tokens, now)

    def _has_room(self, arrival: Request, leaving: Request | None) -> bool:
        num_requests = len(self._queue) - (leaving is not None)
        num_tokens = self._queue.num_tokens - (len(leaving.token_ids) if leaving else 0)
        if num_requests < self._cache.num_free_slots:
            return True
        if self._max_requests and (num_requests >= self._max_requests + self._cache.num_free_slots):
            return False
        if self._max_tokens and num_requests:
            return num_tokens + len(arrival.token_ids) <= self._max_tokens
        return True

    def _outranks(self, arrival: Request, least: Request) -> bool:
        if arrival.priority != least.level:
            return arrival.priority > least.level
        if arrival.tenant == least.tenant:
            return False
        mine = self._queue.num_waiting(arrival.tenant, least.level)
        return mine + 1 < self._queue.num_waiting(least.tenant, least.level)
