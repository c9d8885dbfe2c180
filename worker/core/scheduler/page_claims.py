"""Page claims: pages for the rows of running requests, if need be by preempting others."""

from __future__ import annotations

from worker.core.cache.lease import Lease
from worker.core.cache.manager import CacheManager
from worker.core.request import Request
from worker.core.scheduler.lifecycle import Lifecycle
from worker.core.scheduler.state import SchedulerState
from worker.core.scheduler.step import StepBuilder


def num_still_needed(request: Request, page_size: int, cache: CacheManager) -> int:
    """Pages that a running request lacks to compute all its known tokens and a page beyond."""
    assert request.lease is not None
    num_tokens = min(request.limit, len(request.token_ids) + page_size)
    return cache.num_still_needed(num_tokens, request.lease)


class PageClaims:
    """Finds pages for the next positions of a running request.

    It takes, in this order: free pages, evictable ones, those that a step in flight is about to
    free (by waiting for it), and those of requests after the claimant in the running set. The last
    request of the set never takes from others: it waits, keeping its pages, until one before it
    ends or preempts it. A request that is alone and holds duplicates of cached pages is itself
    preempted, and is admitted again with the cached ones.
    """

    def __init__(self, state: SchedulerState, lifecycle: Lifecycle) -> None:
        self._page_size = state.config.page_size
        self._cache = state.cache
        self._running = state.running
        self._lifecycle = lifecycle
        self.num_promised = 0
        """Pages (blocks) that requests admitted to this step take after the running ones."""

    def add_row(self, request: Request, lease: Lease, length: int, builder: StepBuilder) -> int:
        """Adds a row of `length` positions, or of as many as there are pages for, if any; returns
        their number."""
        if request.num_computed + length > len(lease.pages) * self._page_size:
            length = self._claim(request, lease, length, builder)
        if length:
            builder.add_row(request, lease, length)
        return length

    def add_draft_row(
        self, request: Request, lease: Lease, num_drafts: int, builder: StepBuilder
    ) -> None:
        """Adds a speculative row, with pages for as far as it may reach.

        For drafts no request is preempted, and no promised page is taken. The same holds for a
        token whose position depends on steps in flight: it waits for them. Without a page for its
        newest token the request gets no row.
        """
        page_size, start = self._page_size, request.num_computed
        # The last token of a request is drawn and never computed.
        least = min(request.limit - 1, start + request.num_unverified + 1)
        most = min(request.limit - 1, least + num_drafts)
        num_pages = len(lease.pages)
        missing = -(-least // page_size) - num_pages
        if request.num_unverified and missing > max(0, self._num_spare):
            return
        if missing > self._cache.num_allocatable and not self._make_available(request):
            return
        missing = max(missing, min(-(-most // page_size) - num_pages, self._num_spare))
        if missing > 0:
            self._cache.allocate(lease, missing)
            builder.write_pages(lease.slot, self._cache.page_rows(lease, num_pages))
        end = min(most, len(lease.pages) * page_size)
        builder.add_draft_row(request, lease, end, min(num_drafts, end - start - 1))

    @property
    def _num_spare(self) -> int:
        return self._cache.num_allocatable - self.num_promised

    def _claim(self, request: Request, lease: Lease, length: int, builder: StepBuilder) -> int:
        """Extends `lease` for `length` more positions, or for as many as there are pages for;
        returns their number."""
        start = len(lease.pages)
        space = start * self._page_size - request.num_computed
        if not space and not self._make_available(request):
            return 0
        missing = -(-(length - space) // self._page_size)
        # Admission has kept enough for them, but where windows are still to advance.
        missing = min(missing, max(self._num_spare, 0))
        if missing:
            self._cache.allocate(lease, missing)
            builder.write_pages(lease.slot, self._cache.page_rows(lease, start))
        return min(length, space + missing * self._page_size)

    def _make_available(self, request: Request) -> bool:
        """Whether at least one page is available, after preempting requests if need be."""
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
                # Alone, it can lack pages only where it holds its own beside equal cached ones.
                assert victim.lease.duplicates, "one request alone does not fit: not refused"
            self._lifecycle.preempt(victim)
            if victim is request:
                return False
        return True

    def _will_advance(self) -> bool:
        """Whether pages come free since a step in flight moves a window on."""
        return self._cache.has_windows and any(
            request.lease is not None
            and not self._lifecycle.is_idle(request)
            and self._cache.will_advance(request.lease, request.num_computed)
            for request in self._running
        )
