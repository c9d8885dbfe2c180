"""The worker that will begin soonest, whatever it has cached."""

from __future__ import annotations

from router.fleet.base import RequestView, RoutingPolicy
from router.fleet.workers import Floats, WorkerTable


class LeastLoadPolicy(RoutingPolicy):
    """cost = seconds of prompts before it, plus a step per request in the batch."""

    tolerance = 1e-3  # estimates are no better than that

    def costs(self, request: RequestView, workers: WorkerTable, now: float) -> Floats:
        """See RoutingPolicy."""
        return workers.waiting_s(now) + workers.step_s * workers.num_active / workers.max_num_seqs
