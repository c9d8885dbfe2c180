"""A waiting request preempts running ones that are much less urgent."""

from __future__ import annotations

from collections.abc import Collection

from worker.core.request import Request
from worker.core.scheduler.host_load_policy import HostLoadPolicy
from worker.core.scheduler.page_claims import num_still_needed
from worker.core.scheduler.state import SchedulerState

MAX_PROGRESS = 64
"""Tokens after which any request that was preempted may be preempted again."""


class PriorityPreemption:
    """Chooses who gives way: of those outranked by the gap the least urgent, then the cheapest.

    Cheapest is who has the fewest tokens to compute again, where those that come back from host
    memory count by the time that takes. Nobody is chosen unless that makes room at once, or in the
    next step, where a row of the chosen is in flight.

    No ping-pong: a running request keeps the level with which it was admitted, and whoever took
    its place is the gap above, more than a deadline can add. No thrash: after each time that
    it was preempted, a request must get twice as many tokens before that can happen again, up to
    MAX_PROGRESS, so that the work done over stays a fraction of the work done.
    """

    def __init__(self, state: SchedulerState, host_loads: HostLoadPolicy) -> None:
        self.gap = state.config.preempt_priority_gap
        """Levels; 0 for nobody ever gives way."""
        self._page_size = state.config.page_size
        self._cache = state.cache
        self._running = state.running
        self._host_loads = host_loads

    def is_possible(self, level: int) -> bool:
        """Whether somebody runs who is outranked by one of this level."""
        return bool(
            self.gap and len(self._running) and self._running.last().level <= level - self.gap
        )

    def victims(self, request: Request, num_missing: int, spared: Collection[str]) -> list[Request]:
        """Who has to give way for a slot and `num_missing` pages for `request`; none where that
        would not do.

        Args:
            request: that waits.
            num_missing: pages.
            spared: running requests, by id, that give way to somebody else.
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
            and _may_give_way(request)
        ]
        found.sort(key=lambda r: (r.level, self._resume_cost(r, loses_pages), -r.arrival))
        return found

    def _resume_cost(self, request: Request, loses_pages: bool) -> int:
        """Tokens it would compute again: the loose end, and where others take its pages all.

        Pages that go to host memory count by the time in which they come back.
        """
        assert request.lease is not None
        num_cached = request.lease.num_cached_pages * self._page_size
        loose_end = request.num_computed - num_cached
        return loose_end + self._host_loads.cost(num_cached) if loses_pages else loose_end

    def _num_gained(self, victim: Request) -> int:
        """Pages for others: what it frees, and what is kept for it now."""
        assert victim.lease is not None
        kept = num_still_needed(victim, self._page_size, self._cache)
        return self._cache.num_held_alone(victim.lease) + kept


def _may_give_way(request: Request) -> bool:
    if not request.preemption.count:
        return True
    progress = len(request.token_ids) - request.preemption.resumed_at
    return progress >= min(2 << request.preemption.count, MAX_PROGRESS)
