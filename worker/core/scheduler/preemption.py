"""Taking requests back from the running set: for pages that run out, or for a more urgent one."""

from __future__ import annotations

from worker.core.cache.lease import Lease
from worker.core.cache.manager import CacheManager
from worker.core.request import Request, RequestState
from worker.core.scheduler.clock import Clock
from worker.core.scheduler.load import Tally
from worker.core.scheduler.queue import WaitingQueue
from worker.core.scheduler.running import RunningSet
from worker.core.scheduler.step import StepBuilder


class Withdrawal:
    """The one way out of the running set and back into the queue.

    What the request has computed stays in the prefix cache, as far as it fills pages, until others
    need them, and in host memory, where there is such a tier, thereafter; what it holds beside that
    is free again.

    HAZARD(fence): the pages and the slot of a request with a row in flight come free only after
    that step, so taking it back at once would free nothing and throw work away. It is parked
    instead: left out of one step, so that the next one finds it with nothing in flight.
    """

    def __init__(
        self,
        cache: CacheManager,
        running: RunningSet,
        queue: WaitingQueue,
        tally: Tally,
        clock: Clock,
    ) -> None:
        self.parked: dict[str, Request] = {}
        """Get no row in the step being put together."""
        self._cache = cache
        self._running = running
        self._queue = queue
        self._tally = tally
        self._clock = clock

    def is_settled(self, request: Request) -> bool:
        """Whether taking it back frees what it holds at once."""
        assert request.lease is not None
        return self._cache.is_settled(request.lease)

    def park(self, request: Request) -> None:
        """Leaves it out of the step being put together."""
        self.parked[request.request_id] = request

    def take_back(self, request: Request) -> None:
        """Moves a settled request from the running set into the queue."""
        assert not request.num_placeholders, "a step in flight draws a token for it"
        self.withdraw(request)
        self._queue.push_back(request, self._clock())
        self._tally.num_preemptions += 1

    def withdraw(self, request: Request) -> None:
        """Takes a request out of the running set; the caller keeps it elsewhere."""
        assert request.lease is not None
        self._running.remove(request)
        self._cache.release(request.lease)
        request.lease = None
        request.num_withdrawn = request.num_computed
        request.num_computed = request.num_placeholders = request.num_unverified = 0
        request.num_prefill = len(request.token_ids)
        request.num_preempted += 1
        request.uncached_round = -1
        request.move_to(RequestState.PREEMPTED)


class PageClaims:
    """Finds pages for the next positions of a running request.

    In this order: free pages, evictable ones, pages about to be freed by a step in flight (by
    waiting for it), pages of requests that stand after the claimant in the running set. The last
    of the set never takes from others: it waits, keeping what it has, until one before it ends
    or takes it back. One that is alone and holds pages that the cache has too is itself taken back:
    it comes again with the cached ones.
    """

    def __init__(
        self, page_size: int, cache: CacheManager, running: RunningSet, withdrawal: Withdrawal
    ) -> None:
        self._page_size = page_size
        self._cache = cache
        self._running = running
        self._withdrawal = withdrawal
        self.num_promised = 0
        """Pages that requests admitted to this step take once the running ones have theirs."""

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

    def add_draft_row(
        self, request: Request, lease: Lease, num_drafts: int, builder: StepBuilder
    ) -> None:
        """Adds a speculative row, with pages for as far as it may reach.

        Drafts take pages only where nobody else has to give any, and none that are promised: they
        can do without. So can a token whose place the steps in flight leave open: it waits for
        them. Without a page for its own token the request is skipped.
        """
        page_size, start = self._page_size, request.num_computed
        # The last token of a request is drawn and never computed.
        least = min(request.limit - 1, start + request.num_unverified + 1)
        most = min(request.limit - 1, least + num_drafts)
        num_pages = len(lease.pages)
        missing = -(-least // page_size) - num_pages
        if request.num_unverified and missing > max(0, self._num_spare):
            return
        if missing > self._cache.num_available and not self._make_available(request):
            return
        missing = max(missing, min(-(-most // page_size) - num_pages, self._num_spare))
        if missing > 0:
            builder.write_pages(lease.slot, num_pages, self._cache.extend(lease, missing))
        end = min(most, len(lease.pages) * page_size)
        builder.add_draft_row(request, lease, end, min(num_drafts, end - start - 1))

    @property
    def _num_spare(self) -> int:
        return self._cache.num_available - self.num_promised

    def _make_available(self, request: Request) -> bool:
        """Whether at least one page is available, after taking back whom it takes."""
        while not self._cache.num_available:
            if self._cache.is_fenced:
                return False
            victim = self._running.last()
            if victim is request and len(self._running) > 1:
                return False
            assert victim.lease is not None
            if not self._withdrawal.is_settled(victim):
                self._withdrawal.park(victim)
                return False
            if victim is request:
                # Alone, it can lack pages only where it holds its own beside equal cached ones.
                assert victim.lease.duplicates, "one request alone does not fit: not refused"
            self._withdrawal.take_back(victim)
            if victim is request:
                return False
        return True
