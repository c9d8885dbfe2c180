"""Page claims: allocates pages for rows of running requests, preempting other requests if none is
free."""

from __future__ import annotations

from worker.core.cache.lease import Lease
from worker.core.cache.manager import CacheManager
from worker.core.request import Request
from worker.core.scheduler.lifecycle import Lifecycle
from worker.core.scheduler.state import SchedulerState
from worker.core.scheduler.step import StepBuilder


def num_still_needed(request: Request, page_size: int, cache: CacheManager) -> int:
    """Number of pages that a running request still needs for all of its known tokens and another
    page of tokens or, with canvases, the next canvas."""
    assert request.lease is not None
    num_tokens = min(request.limit, len(request.token_ids) + page_size)
    if request.has_canvases:
        num_tokens = request.num_to_compute
    return cache.num_still_needed(num_tokens, request.lease)


class PageClaims:
    """Finds pages for the next positions of a running request.

    Pages are taken in this order: free ones, evictable ones, those that a step in flight is about
    to free (by waiting for it), and those of requests after the claimant in the running set. The
    last request of the set never takes pages from other requests: it waits, and keeps its own
    pages until an earlier request ends or preempts it. If the only running request finds no page,
    it has duplicates of cached pages, and is preempted and readmitted with the cached pages.
    """

    def __init__(self, state: SchedulerState, lifecycle: Lifecycle) -> None:
        self._page_size = state.config.page_size
        self._cache = state.cache
        self._running = state.running
        self._lifecycle = lifecycle
        self.num_promised = 0
        """Number of pages (blocks) reserved for requests admitted to this step, whose rows follow
        those of running requests."""

    def add_row(self, request: Request, lease: Lease, length: int, builder: StepBuilder) -> int:
        """Adds a row of up to `length` positions, limited by the available pages; returns its
        length."""
        if request.num_computed + length > len(lease.pages) * self._page_size:
            length = self._claim(request, lease, length, builder)
        if length:
            builder.add_row(request, lease, length)
        return length

    def extend(self, request: Request, lease: Lease, length: int, builder: StepBuilder) -> bool:
        """Extends a lease by the pages for the next `length` positions; returns whether there were
        enough pages. If not, the lease keeps those that it got."""
        end = request.num_computed + length
        while (missing := -(-end // self._page_size) - len(lease.pages)) > 0:
            if not self._make_available(request):
                return False
            start = len(lease.pages)
            self._cache.allocate(lease, min(missing, self._cache.num_allocatable))
            builder.write_pages(lease.slot, self._cache.page_rows(lease, start))
        return True

    def add_draft_row(
        self, request: Request, lease: Lease, num_drafts: int, builder: StepBuilder
    ) -> None:
        """Adds a speculative row, with pages for its maximum extent.

        No request is preempted and no reserved page is used for drafts, nor for a token whose
        position depends on steps in flight; such a token waits for these steps. If there is no page
        for the newest token, the request gets no row.
        """
        page_size, start = self._page_size, request.num_computed
        # The last token of a request is sampled but never computed.
        min_end = min(request.limit - 1, start + request.num_unverified + 1)
        max_end = min(request.limit - 1, min_end + num_drafts)
        num_pages = len(lease.pages)
        missing = -(-min_end // page_size) - num_pages
        if request.num_unverified and missing > max(0, self._num_spare):
            return
        if missing > self._cache.num_allocatable and not self._make_available(request):
            return
        missing = max(missing, min(-(-max_end // page_size) - num_pages, self._num_spare))
        if missing > 0:
            self._cache.allocate(lease, missing)
            builder.write_pages(lease.slot, self._cache.page_rows(lease, num_pages))
        end = min(max_end, len(lease.pages) * page_size)
        builder.add_draft_row(request, lease, end, min(num_drafts, end - start - 1))

    @property
    def _num_spare(self) -> int:
        return self._cache.num_allocatable - self.num_promised

    def _claim(self, request: Request, lease: Lease, length: int, builder: StepBuilder) -> int:
        """Extends `lease` by up to `length` positions, limited by the available pages; returns the
        number of positions."""
        start = len(lease.pages)
        space = start * self._page_size - request.num_computed
        if not space and not self._make_available(request):
            return 0
        missing = -(-(length - space) // self._page_size)
        # Admission has reserved enough for them, except while windows have yet to advance.
        missing = min(missing, max(self._num_spare, 0))
        if missing:
            self._cache.allocate(lease, missing)
            builder.write_pages(lease.slot, self._cache.page_rows(lease, start))
        return min(length, space + missing * self._page_size)

    def _make_available(self, request: Request) -> bool:
        """Preempts requests if necessary to make a page available; returns whether one is."""
        while not self._cache.num_allocatable:
            if self._cache.is_fenced or self._will_advance():
                return False
            victim = self._running.last()
            if victim is request and len(self._running) > 1:
                return False
            assert victim.lease is not None
            if not self._lifecycle.is_idle(victim):
                self._lifecycle.defer_preemption(victim)
                return False
            if victim is request:
                # A single running request can only lack pages if it has duplicates of cached ones.
                assert victim.lease.duplicates, "request should have been rejected"
            self._lifecycle.preempt(victim)
            if victim is request:
                return False
        return True

    def _will_advance(self) -> bool:
        """Whether pages will be freed because a step in flight advances a window."""
        return self._cache.has_windows and any(
            request.lease is not None
            and not self._lifecycle.is_idle(request)
            and self._cache.will_advance(request.lease, request.num_computed)
            for request in self._running
        )
