"""The better of two workers drawn at random."""

from __future__ import annotations

import numpy as np

from router.fleet.base import RequestView
from router.fleet.least_load import LeastLoadPolicy
from router.fleet.workers import Floats, WorkerTable


class PowerOfTwoPolicy(LeastLoadPolicy):
    """Mitzenmacher's two choices: by load, but blind to all workers except two.

    Gateways that decide on the same stale view do not all run to the same worker.

    Args:
        seed: of the draws.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)

    def costs(self, request: RequestView, workers: WorkerTable, now: float) -> Floats:
        """See RoutingPolicy."""
        costs = super().costs(request, workers, now)
        rows = np.flatnonzero(request.eligible)
        if len(rows) > 2:
            drawn = self._random.choice(rows, 2, replace=False)
            blind = np.full(len(costs), np.inf)
            blind[drawn] = costs[drawn]
            return blind
        return costs
