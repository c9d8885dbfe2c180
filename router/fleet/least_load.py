"""The worker that will begin soonest, whatever it has cached."""

from __future__ import annotations

from router.fleet.base import EstimatingPolicy, Terms
from router.fleet.estimate import Estimate
from router.fleet.request_view import RequestView
from router.fleet.workers import WorkerTable


class LeastLoadPolicy(EstimatingPolicy):
    """cost = seconds of prompts before it, plus a step for a full batch."""

    def terms(
        self, request: RequestView, estimate: Estimate, workers: WorkerTable, now: float
    ) -> Terms:
        """Seconds by worker; see RoutingPolicy.terms."""
        batch_s = workers.step_s * workers.num_active / workers.max_num_seqs
        return {"queue": workers.waiting_s(now), "batch": batch_s}
