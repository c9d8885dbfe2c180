"""A waiting request takes the place of running ones that are much less urgent."""

from __future__ import annotations

from worker.core.cache.manager import CacheManager
from worker.core.request import Request
from worker.core.scheduler.pages import num_still_needed
from worker.core.scheduler.policy import Outcome
from worker.core.scheduler.preemption import Withdrawal
from worker.core.scheduler.recall import Recall
from worker.core.scheduler.running import RunningSet

MAX_PROGRESS = 64
"""Tokens after which any request that was taken back may be taken back again."""


class Displacement:
    """Chooses who gives way: of those outranked by `gap` the least urgent, then the cheapest.

    Cheapest is who has the fewest tokens to compute again, where those that come back from host
    memory count by the time that takes. Nobody is taken back unless that makes
    place at once: with a row in flight it is parked first, and gives way in the next step.

    No ping-pong: a running request keeps the level with which it was admitted, and whoever took
    its place is `gap` levels above, more than a deadline can add. No thrash: after each time that
    it was taken back, a request must get twice as many tokens before that can happen again, up to
    MAX_PROGRESS, so that the work done over stays a fraction of the work done.

    Args:
        gap: levels; 0 for nobody ever gives way.
        page_size: tokens per page.
    """

    def __init__(
        self,
        gap: int,
        page_size: int,
        cache: CacheManager,
        running: RunningSet,
        withdrawal: Withdrawal,
        recall: Recall,
    ) -> None:
        self.gap = gap
        self._page_size = page_size
        self._cache = cache
        self._running = running
        self._withdrawal = withdrawal
        self._recall = recall
        self._chosen: dict[str, Request] = {}
        """Will give way to somebody else."""

    def begin_round(self) -> None:
        """Forgets who was chosen in the round before."""
        self._chosen.clear()

    def is_possible(self, level: int) -> bool:
        """Whether somebody runs who is outranked by one of this level."""
        return bool(
            self.gap and len(self._running) and self._running.last().level <= level - self.gap
        )

    def make_place(self, request: Request, num_missing: int) -> Outcome:
        """Tries to free a slot and `num_missing` pages for `request`.

        ENTERED says that they are free now, for the caller to check and to use.
        """
        if not self.is_possible(request.level):
            return Outcome.NO_PLACE
        victims: list[Request] = []
        for victim in self._candidates(request.level - self.gap, num_missing > 0):
            victims.append(victim)
            num_missing -= self._num_gained(victim)
            if num_missing <= 0:
                break
        if not victims or num_missing > 0:
            return Outcome.NO_PLACE
        self._chosen.update((victim.request_id, victim) for victim in victims)
        if not all(map(self._withdrawal.is_settled, victims)):
            for victim in victims:
                self._withdrawal.park(victim)
            return Outcome.MAKING_PLACE
        for victim in victims:
            self._withdrawal.take_back(victim)
        return Outcome.ENTERED

    def _candidates(self, max_level: int, loses_pages: bool) -> list[Request]:
        found = [
            request
            for request in self._running
            if request.level <= max_level
            and request.request_id not in self._chosen
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
        return loose_end + self._recall.cost(num_cached) if loses_pages else loose_end

    def _num_gained(self, victim: Request) -> int:
        """Pages for others: what it frees, and what is kept for it now."""
        assert victim.lease is not None
        kept = num_still_needed(victim, self._page_size)
        return self._cache.num_held_alone(victim.lease) + kept


def _may_give_way(request: Request) -> bool:
    if not request.num_preempted:
        return True
    progress = len(request.token_ids) - request.resumed_at
    return progress >= min(2 << request.num_preempted, MAX_PROGRESS)
