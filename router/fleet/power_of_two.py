"""The better of two workers drawn at random."""

from __future__ import annotations

import numpy as np

from router.fleet.base import Terms, rendezvous
from router.fleet.estimate import Estimate
from router.fleet.least_load import LeastLoadPolicy
from router.fleet.request_view import RequestView
from router.fleet.workers import WorkerTable


class PowerOfTwoPolicy(LeastLoadPolicy):
    """Mitzenmacher's two choices: by load, but blind to all workers except two.

    Gateways that decide on the same stale view do not all run to the same worker.
    """

    def __init__(self) -> None:
        self._num_placed = 0

    def observe(self, request: RequestView, work_s: float, now: float) -> None:
        """The next request draws anew; see RoutingPolicy.observe."""
        self._num_placed += 1

    def terms(
        self, request: RequestView, estimate: Estimate, workers: WorkerTable, now: float
    ) -> Terms:
        """Seconds by worker, infinite for those not drawn; see RoutingPolicy.terms."""
        terms = super().terms(request, estimate, workers, now)
        rows = np.flatnonzero(request.eligible)
        if len(rows) <= 2:
            return terms
        # A random number per worker, another one for each request: the two greatest are drawn.
        numbers = rendezvous(workers.seeds[rows], self._num_placed)
        undrawn = np.full(len(workers.seeds), np.inf)
        undrawn[rows[numbers.argpartition(-2)[-2:]]] = 0.0
        return {**terms, "undrawn": undrawn}
