"""One after the other."""

from __future__ import annotations

import numpy as np

from router.fleet.base import RoutingPolicy, Terms
from router.fleet.estimate import Estimate
from router.fleet.request_view import RequestView
from router.fleet.workers import WorkerTable


class RoundRobinPolicy(RoutingPolicy):
    """The worker that has waited longest for a request."""

    def terms(
        self, request: RequestView, estimate: Estimate, workers: WorkerTable, now: float
    ) -> Terms:
        """Ranks of workers by when they were chosen last; see RoutingPolicy.terms."""
        # Ranks rather than turns: turns grow, and equal costs are a matter of proportion.
        return {"rank": workers.last_chosen.argsort(kind="stable").argsort().astype(np.float64)}
