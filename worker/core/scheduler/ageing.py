"""Progress: nobody is passed over for ever, whatever policy orders the queue."""

from __future__ import annotations

from collections.abc import Iterable

from worker.core.request import Request

MAX_PASSES = 64
"""Rounds in which the elder may be passed over."""


class Ageing:
    """Counts how often the elder, who has been in the highest level for longest, is passed over.

    A round passes the elder over if it admits others of its level or below, and not the elder.
    After MAX_PASSES such rounds every round is fifo with the elder at the head, and nobody else
    gets in before it; since running requests end, there is room for it at some time. The next
    becomes elder then, so a request that k others of its level precede (by when they entered the
    level), and that no more urgent ones keep out, is passed over in at most
    (k + 1) · MAX_PASSES rounds, under pack, lpm, deadlines and fair share alike.
    """

    def __init__(self) -> None:
        self._elder: Request | None = None
        self._generation = 0
        self._num_passes = 0

    def is_due(self, elder: Request) -> bool:
        """Whether `elder` must be the next."""
        return (
            elder is self._elder
            and elder.generation == self._generation
            and self._num_passes >= MAX_PASSES
        )

    def count(self, elder: Request, generation: int, admitted: Iterable[Request]) -> None:
        """Notes whom a round admitted while `elder`, then of this generation, waited."""
        if elder is not self._elder or generation != self._generation:
            self._elder, self._generation, self._num_passes = elder, generation, 0
        requests = list(admitted)
        if elder not in requests and any(r.level <= elder.level for r in requests):
            self._num_passes += 1
