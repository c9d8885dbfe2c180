"""One after the other."""

from __future__ import annotations

import numpy as np

from router.fleet.base import RequestView, RoutingPolicy
from router.fleet.workers import Floats, WorkerTable


class RoundRobinPolicy(RoutingPolicy):
    """The worker that has waited longest for a request."""

    def costs(self, request: RequestView, workers: WorkerTable, now: float) -> Floats:
        """See RoutingPolicy."""
        # Ranks rather than turns: turns grow, and equal costs are a matter of proportion.
        return workers.last_chosen.argsort(kind="stable").argsort().astype(np.float64)
