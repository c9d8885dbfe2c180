"""Starvation guard: prevents requests from being passed over forever, under any queue policy."""

from __future__ import annotations

from collections.abc import Iterable

from worker.core.request import Request

MAX_PASSES = 64
"""Maximum number of rounds in which the oldest request may be passed over."""


class StarvationGuard:
    """Counts how often the oldest request, the one that has been in the highest level for the
    longest time, is passed over.

    A round passes over the oldest request if it admits other requests of its level or below
    instead. After MAX_PASSES such rounds, every round is fifo with the oldest request at the head,
    and no other request is admitted before it. Since running requests end, there will be room for
    it. The next request then becomes the oldest. A request that entered its level after k others is
    thus passed over in at most (k + 1) · MAX_PASSES rounds if there are no more urgent ones, with
    any combination of pack, lpm, deadlines and fair sharing.
    """

    def __init__(self) -> None:
        self._oldest: Request | None = None
        self._generation = 0
        self._num_passes = 0

    def is_due(self, oldest: Request) -> bool:
        """Whether `oldest` must be admitted next."""
        return (
            oldest is self._oldest
            and oldest.queue_entry.generation == self._generation
            and self._num_passes >= MAX_PASSES
        )

    def count(self, oldest: Request, generation: int, admitted: Iterable[Request]) -> None:
        """Counts the requests admitted in a round while `oldest`, whose generation is `generation`,
        waited."""
        if oldest is not self._oldest or generation != self._generation:
            self._oldest, self._generation, self._num_passes = oldest, generation, 0
        requests = list(admitted)
        if oldest not in requests and any(r.level <= oldest.level for r in requests):
            self._num_passes += 1
