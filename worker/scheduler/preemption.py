"""Pages for running requests; when they run out, the youngest lowest request is taken back."""

from __future__ import annotations

from worker.cache.lease import Lease
from worker.cache.manager import CacheManager
from worker.request import Request, RequestState
from worker.scheduler.config import SchedulerConfig
from worker.scheduler.load import Tally
from worker.scheduler.queue import FcfsQueue
from worker.scheduler.running import RunningSet
from worker.scheduler.step import StepBuilder


class PageClaims:
    """Finds pages for the next positions of a running request.

    In this order: free pages, evictable ones, pages about to be freed by a step in flight (by
    waiting for it), pages of requests that stand after the claimant in the running set. The last
    of the set never takes from others: it waits, keeping what it has, until one before it ends
    or takes it back. One that is alone and holds pages that the cache has too is itself taken back:
    it comes again with the cached ones.

    HAZARD(fence): the pages of a request with a row in flight come free only after that step, so
    taking it back at once would free nothing and throw work away. It is parked instead: left out
    of this step, so that the next one finds it with nothing in flight.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        running: RunningSet,
        queue: FcfsQueue,
        tally: Tally,
    ) -> None:
        self.parked: Request | None = None
        """Gets no row in the step being put together."""
        self._page_size = config.page_size
        self._cache = cache
        self._running = running
        self._queue = queue
        self._tally = tally

    def claim(self, request: Request, lease: Lease, length: int, builder: StepBuilder) -> int:
        """Extends `lease` for `length` more positions, or for as many as there are pages for.

        Returns how many positions can be computed in this step; 0 tells to skip the request.
        """
        start = len(lease.pages)
        room = start * self._page_size - request.num_computed
        if not room and not self._make_available(request):
            return 0
        missing = -(-(length - room) // self._page_size)
        missing = min(missing, self._cache.num_available)
        if missing:
            builder.write_pages(lease.slot, start, self._cache.extend(lease, missing))
        return min(length, room + missing * self._page_size)

    def _make_available(self, request: Request) -> bool:
        """Whether at least one page is available, after taking back whom it takes."""
        while not self._cache.num_available:
            if self._cache.is_fenced:
                return False
            victim = self._running.victim()
            if victim is request and len(self._running) > 1:
                return False
            assert victim.lease is not None
            if not self._cache.is_settled(victim.lease):
                self.parked = victim
                return False
            if victim is request:
                # Alone, it can lack pages only where it holds its own beside equal cached ones.
                assert victim.lease.duplicates, "one request alone does not fit: not refused"
            self._take_back(victim)
            if victim is request:
                return False
        return True

    def _take_back(self, request: Request) -> None:
        assert request.lease is not None
        assert not request.num_placeholders, "a step in flight draws a token for it"
        self._running.remove(request)
        self._cache.release(request.lease)
        request.lease = None
        request.num_computed = 0
        request.num_prefill = len(request.token_ids)
        request.move_to(RequestState.PREEMPTED)
        self._queue.push_back(request)
        self._tally.num_preemptions += 1
