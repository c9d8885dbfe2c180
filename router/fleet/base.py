"""The rule that chooses one of the workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from router.fleet.request import Estimate, RequestView
from router.fleet.workers import Floats, WorkerTable

Terms = Mapping[str, Floats]
"""The terms of workers' costs by name, per row of the WorkerTable."""


@dataclass(slots=True)
class Decision:
    """A policy's answer to a request: the worker, and why."""

    row: int
    """The chosen worker's row."""
    terms: Terms
    """The terms of all workers' costs."""


class RoutingPolicy(ABC):
    """Rates workers for one request; the lowest cost wins.

    Rating is pure: it reads no clock and learns nothing, so that asking twice gives the same answer
    and a decision can be explained afterwards. What a policy learns, it learns in `observe`.
    """

    tolerance: ClassVar[float] = 0.0
    """Costs that differ by less than this part count as equal."""

    @abstractmethod
    def terms(
        self, request: RequestView, estimate: Estimate, workers: WorkerTable, now: float
    ) -> Terms:
        """The cost of giving the request to each worker, as a sum of terms.

        Args:
            request: to be placed.
            estimate: its first token at each worker.
            workers: all of them; those that may not take the request may get any number.
            now: the fleet's clock, in seconds.
        """

    def observe(self, request: RequestView, work_s: float, now: float) -> None:
        """The request was placed at a worker, which takes `work_s` to compute it."""
        return

    def choose(
        self, request: RequestView, estimate: Estimate, workers: WorkerTable, now: float
    ) -> Decision | None:
        """The cheapest eligible worker; None if there is none."""
        terms = self.terms(request, estimate, workers, now)
        costs = np.where(request.eligible, total(terms), np.inf)
        row = int(costs.argmin())
        best = costs.item(row)
        if best == np.inf:
            return None
        ties = (costs <= best + self.tolerance * abs(best)).nonzero()[0]
        if len(ties) > 1:
            row = break_tie(ties, request, workers)
        return Decision(row, terms)


def total(terms: Terms) -> Floats:
    """The sum of terms, in their order."""
    first, *others = terms.values()
    result = first.copy()
    for values in others:
        result += values
    return result


def break_tie(rows: NDArray[np.intp], request: RequestView, workers: WorkerTable) -> int:
    """One of equally good workers, in the long run each as often.

    By rendezvous hashing of the first block that the request would bring into a cache: several
    gateways send requests that share a prefix to one worker and others to different ones, without
    asking each other. A request that brings nothing new goes to the worker that has waited longest.
    """
    place = int(request.hit_tokens.item(rows[0])) // request.page_size
    if place >= len(request.hashes):
        return int(rows[workers.last_chosen[rows].argmin()])
    key = request.hashes.item(place)
    return int(rows[rendezvous(workers.seeds[rows], key).argmax()])


def rendezvous(seeds: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """A number per seed, as good as random but always the same for one key."""
    values = seeds ^ np.uint64(key)
    values *= np.uint64(0x9E3779B97F4A7C15)
    values ^= values >> np.uint64(32)
    values *= np.uint64(0xD6E8FEB86659FD93)
    values ^= values >> np.uint64(32)
    return values
