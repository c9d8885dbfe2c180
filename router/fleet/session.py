"""A conversation stays where it began."""

from __future__ import annotations

import numpy as np
from xxhash import xxh3_64_intdigest

from router.fleet.base import RequestView, RoutingPolicy, rendezvous
from router.fleet.workers import Floats, WorkerTable


class SessionPolicy(RoutingPolicy):
    """Rendezvous hashing of the session's name: a worker that leaves moves its sessions only.

    Requests without a session go to the worker that has waited longest.
    """

    def costs(self, request: RequestView, workers: WorkerTable, now: float) -> Floats:
        """See RoutingPolicy."""
        if not request.session:
            return workers.last_chosen.argsort(kind="stable").argsort().astype(np.float64)
        values = rendezvous(workers.seeds, xxh3_64_intdigest(request.session.encode()))
        return (~values).argsort(kind="stable").argsort().astype(np.float64)
