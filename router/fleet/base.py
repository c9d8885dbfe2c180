"""RoutingPolicy: base class of policies, which choose a request's worker by cost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from router.fleet.request import Estimate, RequestView
from router.fleet.workers import Floats, WorkerTable

# Arrays: numpy converts any other number on each use.
_MIX_A, _MIX_B, _HALF = (
    np.array(value, np.uint64) for value in (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 32)
)

Terms = Mapping[str, Floats]
"""Terms of the workers' costs by name; each array has one entry per row of the WorkerTable."""


class Decision(NamedTuple):
    """The worker chosen for a request, and the costs that led to it."""

    row: int
    """Row of the chosen worker."""
    terms: Terms
    """Terms of the costs of all workers."""


class RoutingPolicy(ABC):
    """A policy computes a cost per worker for a request; the worker with the lowest cost is chosen.

    Computing costs is pure: it reads no clock and changes no state, so that a decision can be
    repeated and explained later. Stateful policies update their state only in `observe` and
    `observe_prefix`.
    """

    tolerance: ClassVar[float] = 0.0
    """Relative difference below which two costs count as equal."""

    @abstractmethod
    def terms(
        self, request: RequestView, estimate: Estimate, workers: WorkerTable, now: float
    ) -> Terms:
        """The cost of placing the request on each worker, as a sum of terms.

        Args:
            request: the request to place.
            estimate: the request's predicted times on each worker.
            workers: all workers; terms of ineligible ones are ignored.
            now: time on the fleet's clock, in seconds.
        """

    def observe(self, request: RequestView, work_s: float, now: float) -> None:
        """Records that a request was placed on a worker, which will compute the prompt in `work_s`
        seconds."""
        return

    def observe_prefix(self, block_hash: int, now: float) -> None:
        """Records that another gateway placed a request. The given block is the last one of the
        request's longest prefix that any worker has cached."""
        return

    def choose(
        self, request: RequestView, estimate: Estimate, workers: WorkerTable, now: float
    ) -> Decision | None:
        """The eligible worker with the lowest cost; None if there is none."""
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
    """Selects one of several workers with equal cost; returns its row.

    The worker is chosen by rendezvous hashing of the first block that the request adds to a cache:
    without communication, all gateways send requests with a common prefix to the same worker, and
    spread other requests over the workers. A request that adds no block goes to the least recently
    chosen worker.
    """
    place = int(request.hit_tokens.item(rows[0])) // request.page_size
    if place >= len(request.hashes):
        return int(rows[workers.last_chosen[rows].argmin()])
    key = request.hashes.item(place)
    return int(rows[rendezvous(workers.seeds[rows], key).argmax()])


def rendezvous(seeds: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """Weights for rendezvous hashing: each worker's seed hashed with `key`."""
    values = seeds ^ np.uint64(key)
    values *= _MIX_A
    values ^= values >> _HALF
    values *= _MIX_B
    values ^= values >> _HALF
    return values
