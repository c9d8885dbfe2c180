"""Preemption by priority: a waiting request replaces much less urgent running ones."""

from __future__ import annotations

from collections.abc import Collection

from worker.core.request import Request
from worker.core.scheduler.host_load_policy import HostLoadPolicy
from worker.core.scheduler.page_claims import num_still_needed
from worker.core.scheduler.state import SchedulerState

MAX_PROGRESS = 64
"""Maximum number of tokens that a resumed request must generate before it can be preempted again.
"""


class PriorityPreemption:
    """Selects victims among requests outranked by at least the gap: least urgent first, then
    cheapest.

    The cheapest has the fewest tokens to recompute; tokens that can be loaded from host memory are
    weighted by the time of the copy. Victims are only selected if they free enough pages, and a
    slot: immediately, or in the next step if one of them has a row in flight.

    Two requests cannot preempt each other alternately: a running request keeps the level with which
    it was admitted, and a request that preempts it exceeds that level by at least the gap, which is
    more than a deadline can add. Repeated work is bounded: after each preemption, a request must
    generate twice as many tokens as after the previous one, up to MAX_PROGRESS, before it can be
    preempted again.
    """

    def __init__(self, state: SchedulerState, host_loads: HostLoadPolicy | None) -> None:
        self.gap = state.config.preempt_priority_gap
        """Minimum difference in level between a request and its victims; 0 disables preemption by
        priority."""
        self._page_size = state.config.page_size
        self._cache = state.cache
        self._running = state.running
        self._host_loads = host_loads

    def is_possible(self, level: int) -> bool:
        """Whether a request of `level` outranks a running one by at least the gap."""
        return bool(
            self.gap and len(self._running) and self._running.last().level <= level - self.gap
        )

    def victims(self, request: Request, num_missing: int, spared: Collection[str]) -> list[Request]:
        """Running requests to preempt for `request`; empty if that would not free enough pages.

        Args:
            request: a waiting request.
            num_missing: number of pages that the request needs, in addition to a slot.
            spared: ids of running requests that are already being preempted for other requests.
        """
        if not self.is_possible(request.level):
            return []
        found: list[Request] = []
        for victim in self._candidates(request.level - self.gap, num_missing > 0, spared):
            found.append(victim)
            num_missing -= self._num_gained(victim)
            if num_missing <= 0:
                return found
        return []

    def _candidates(
        self, max_level: int, loses_pages: bool, spared: Collection[str]
    ) -> list[Request]:
        found = [
            request
            for request in self._running
            if request.level <= max_level
            and request.request_id not in spared
            and _is_preemptible(request)
        ]
        found.sort(key=lambda r: (r.level, self._resume_cost(r, loses_pages), -r.arrival))
        return found

    def _resume_cost(self, request: Request, loses_pages: bool) -> int:
        """Number of tokens to recompute when a victim resumes: those after its cached pages plus,
        if the pages are evicted, the cached ones (or the equivalent cost of loading them from host
        memory)."""
        assert request.lease is not None
        num_cached = request.lease.num_cached_pages * self._page_size
        loose_end = request.num_computed - num_cached
        if not loses_pages:
            return loose_end
        lost = num_cached if self._host_loads is None else self._host_loads.cost(num_cached)
        return loose_end + lost

    def _num_gained(self, victim: Request) -> int:
        """Number of pages that preempting a victim makes available: those that only it uses, and
        its part of the reserve."""
        assert victim.lease is not None
        kept = num_still_needed(victim, self._page_size, self._cache)
        return self._cache.num_held_alone(victim.lease) + kept


def _is_preemptible(request: Request) -> bool:
    if not request.preemption.count:
        return True
    progress = len(request.token_ids) - request.preemption.resumed_at
    return progress >= min(2 << request.preemption.count, MAX_PROGRESS)
