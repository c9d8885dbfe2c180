"""What is known of a request and of workers, and the rule that chooses one of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from router.fleet.queue_order import QueueView
from router.fleet.workers import Floats, WorkerTable
from worker.wire.blocks import BlockHashes


@dataclass(slots=True)
class RequestView:
    """A request as policies see it. Arrays have one entry per row of the WorkerTable."""

    num_tokens: int
    """Of its prompt."""
    eligible: NDArray[np.bool_]
    """Workers that may take it."""
    hit_tokens: Floats
    """Leading tokens that the worker's cache holds, or will by the time it gets to them."""
    host_hit_tokens: Floats | None
    """Those of `hit_tokens` that have to be fetched from host memory; None where none have."""
    coming_tokens: Floats | None
    """Those of `hit_tokens` that other requests are about to compute; None where there are none."""
    best_hit: float
    """The most of `hit_tokens`, eligible or not."""
    best_cached: float
    """The most of what is in a cache already."""
    sharers: int
    """Requests in flight that share at least half of `best_hit`."""
    num_in_flight: int
    """All requests in flight."""
    hashes: BlockHashes
    """Of its full blocks."""
    page_size: int
    """Tokens per block of these."""
    session: str
    """Name of the conversation, where the client gave one."""
    queue: QueueView | None = None
    """The workers' queues as it finds them; None where it goes before no other prompt."""


@dataclass(slots=True)
class Decision:
    """What a policy says about a request."""

    row: int
    """Of the worker."""
    costs: Floats
    """Per row; infinite for workers that may not take it."""


class RoutingPolicy(ABC):
    """Rates workers for one request; the lowest cost wins.

    Pure but for what a policy remembers of its own choices: no clock, no event loop, no metrics.
    """

    tolerance: ClassVar[float] = 0.0
    """Costs that differ by less than this part count as equal."""

    @abstractmethod
    def costs(self, request: RequestView, workers: WorkerTable, now: float) -> Floats:
        """What it costs to give the request to each worker; ineligible ones may get any number."""

    def booked(self, work_s: float) -> None:
        """A request was given to the worker chosen for it, which takes so long to compute it."""
        return

    def choose(self, request: RequestView, workers: WorkerTable, now: float) -> Decision | None:
        """The cheapest eligible worker; None if there is none."""
        costs = np.where(request.eligible, self.costs(request, workers, now), np.inf)
        row = int(costs.argmin())
        best = costs.item(row)
        if best == np.inf:
            return None
        ties = (costs <= best + self.tolerance * abs(best)).nonzero()[0]
        if len(ties) > 1:
            row = break_tie(ties, request, workers)
        return Decision(row, costs)


def break_tie(rows: NDArray[np.intp], request: RequestView, workers: WorkerTable) -> int:
    """One of equally good workers, in the long run each as often.

    By rendezvous hashing of the first block that the request would bring into a cache: several
    gateways send siblings to the same worker and strangers to different ones, without asking each
    other. A request that brings nothing new goes to the worker that has waited longest.
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
