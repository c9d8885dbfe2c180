"""Load shedding: selects the request to reject when the queue is full, and computes
retry delays."""

from __future__ import annotations

from math import ceil, exp

from worker.core.cache.manager import CacheManager
from worker.core.request import Request
from worker.core.scheduler.queue import WaitingQueue
from worker.protocol.messages import Rejection
from worker.protocol.queue_limits import QueueLimits, queue_full

_MEMORY_S = 10.0
"""Time constant of the drain rate in seconds: an admission that long ago has weight 1/e. Only time
during a backlog counts."""
MAX_RETRY_AFTER_S = 120
"""Maximum Retry-After in seconds."""


class DrainRate:
    """Exponentially averaged rate at which the queue drains while there is a backlog.

    Without a backlog, the queue drains at the arrival rate, which does not indicate capacity:
    neither idle time nor admissions that fill free slots at the start of a burst count.
    """

    def __init__(self) -> None:
        self._requests = 0.0
        self._tokens = 0.0
        self._span_s = 0.0
        self._new_requests = 0
        self._new_tokens = 0
        self._at_s = 0.0
        self._has_backlog = False
        self.is_due = False
        """Whether the next step must call `tick` even if no request waits."""

    def note(self, num_tokens: int) -> None:
        """Records that a request with `num_tokens` has left the queue to run."""
        self.is_due = True
        self._new_requests += 1
        self._new_tokens += num_tokens

    def tick(self, now: float, *, is_waiting: bool) -> None:
        """Adds the time since the last step, and the admissions in it, if there was a backlog.

        Args:
            now: time on the scheduler's clock, in seconds.
            is_waiting: whether requests remain in the queue after this step (a backlog).
        """
        # A backlog that ended without an admission was aborted at an unknown time.
        if self._has_backlog and (is_waiting or self._new_requests):
            factor = exp((self._at_s - now) / _MEMORY_S)
            self._requests = self._requests * factor + self._new_requests
            self._tokens = self._tokens * factor + self._new_tokens
            self._span_s = self._span_s * factor + _MEMORY_S * (1.0 - factor)
        self._new_requests = self._new_tokens = 0
        self._at_s = now
        self._has_backlog = self.is_due = is_waiting

    def end_backlog(self) -> None:
        """Records that the queue was empty when a request arrived, for example after aborts."""
        self._has_backlog = False

    def retry_after_s(self, num_requests: int, num_tokens: int) -> int:
        """Time until the given numbers of requests and tokens should have left the queue, in whole
        seconds from 1 to MAX_RETRY_AFTER_S.

        A new backlog has had no admissions yet, so one request of average length is assumed.
        """
        requests = max(self._requests, 1.0)
        tokens = max(self._tokens, num_tokens / num_requests, 1.0)
        longest = max(num_requests / requests, num_tokens / tokens)
        return min(max(ceil(longest * self._span_s), 1), MAX_RETRY_AFTER_S)


class LoadShedder:
    """Rejects an arriving request, or the least urgent waiting one if the arrival is more urgent.

    Among equally urgent requests of several tenants, one of the tenant with the most requests is
    rejected in favor of a tenant with fewer. Requests that have already run are not rejected.

    Args:
        limits: limits of the queue.
        cache: provides the number of free slots.
        drain: drain rate of the queue.
    """

    def __init__(
        self, limits: QueueLimits, queue: WaitingQueue, cache: CacheManager, drain: DrainRate
    ) -> None:
        self._limits = limits
        self._queue = queue
        self._cache = cache
        self._drain = drain

    def loser(self, arrival: Request) -> Request | None:
        """The request to reject if `arrival` is to be queued; None if there is room."""
        if self._has_room(arrival, None):
            return None
        candidate = self._queue.least_urgent()
        if candidate is None or not self._outranks(arrival, candidate):
            return arrival
        return candidate if self._has_room(arrival, candidate) else arrival

    def rejection(self, request: Request) -> Rejection:
        """The HTTP 429 response for a rejected request."""
        return queue_full(
            request.request_id,
            request.attempt,
            num_waiting=self._queue.num_requests,
            num_tokens=self._queue.num_tokens,
            retry_after_s=self.retry_after_s(),
        )

    def retry_after_s(self) -> int:
        """Seconds until the current queue should have drained; 0 if it is empty."""
        num_requests = self._queue.num_requests
        if not num_requests:
            return 0
        return self._drain.retry_after_s(num_requests, self._queue.num_tokens)

    def _has_room(self, arrival: Request, leaving: Request | None) -> bool:
        return self._limits.has_room(
            self._queue.num_requests - (leaving is not None),
            self._queue.num_tokens - (len(leaving.token_ids) if leaving else 0),
            num_free_slots=self._cache.num_free_slots,
            num_new_tokens=len(arrival.token_ids),
        )

    def _outranks(self, arrival: Request, candidate: Request) -> bool:
        if arrival.priority != candidate.level:
            return arrival.priority > candidate.level
        if arrival.tenant == candidate.tenant:
            return False
        mine = self._queue.num_waiting(arrival.tenant, candidate.level)
        return mine + 1 < self._queue.num_waiting(candidate.tenant, candidate.level)
