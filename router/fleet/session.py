"""A conversation stays where it began."""

from __future__ import annotations

import numpy as np
from xxhash import xxh3_64_intdigest

from router.fleet.base import Terms, rendezvous
from router.fleet.estimate import Estimate
from router.fleet.request_view import RequestView
from router.fleet.round_robin import RoundRobinPolicy
from router.fleet.workers import WorkerTable


class SessionPolicy(RoundRobinPolicy):
    """Rendezvous hashing of the session's name: a worker that leaves moves its sessions only.

    Requests without a session go to the worker that has waited longest.
    """

    def terms(
        self, request: RequestView, estimate: Estimate, workers: WorkerTable, now: float
    ) -> Terms:
        """Ranks of workers for the session; see RoutingPolicy.terms."""
        if not request.session:
            return super().terms(request, estimate, workers, now)
        values = rendezvous(workers.seeds, xxh3_64_intdigest(request.session.encode()))
        return {"rank": (~values).argsort(kind="stable").argsort().astype(np.float64)}
