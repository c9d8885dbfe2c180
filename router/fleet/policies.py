"""All routing policies but the default one, and each of them by name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from xxhash import xxh3_64_intdigest

from router.config import PolicyName, RoutingConfig
from router.fleet.adaptive import AdaptivePolicy
from router.fleet.base import RoutingPolicy, Terms, rendezvous
from router.fleet.constants import TOLERANCE
from router.fleet.request import Estimate, RequestView
from router.fleet.utilisation import Utilisation
from router.fleet.workers import WorkerTable


def create_policy(config: RoutingConfig, utilisation: Utilisation) -> RoutingPolicy:
    """The routing policy that `config` names. Raises ValueError with the known names."""
    policies: dict[PolicyName, Callable[[], RoutingPolicy]] = {
        "adaptive": lambda: AdaptivePolicy(utilisation),
        "prefix-score": lambda: PrefixScorePolicy(config),
        "least-load": LeastLoadPolicy,
        "power-of-two": PowerOfTwoPolicy,
        "round-robin": RoundRobinPolicy,
        "session": SessionPolicy,
    }
    if config.routing_policy not in policies:
        raise ValueError(
            f"unknown routing policy {config.routing_policy}: choose one of {', '.join(policies)}"
        )
    return policies[config.routing_policy]()


class PrefixScorePolicy(RoutingPolicy):
    """score = hit_tokens·10 − utilisation·100 + kv_free·0.1 + batch_room·0.5, at stock weights.

    - hit_tokens: leading prompt tokens in the worker's prefix cache;
    - utilisation: requests there (running, waiting, on their way) per place in its batch; 1 is a
      full batch, more means that requests wait;
    - kv_free: percent of KV pages free or evictable, less what requests on their way will need;
    - batch_room: places free in the batch.
    """

    def __init__(self, config: RoutingConfig) -> None:
        self._config = config

    def terms(
        self, request: RequestView, estimate: Estimate, workers: WorkerTable, now: float
    ) -> Terms:
        """The score's terms with their signs turned; see RoutingPolicy.terms."""
        config = self._config
        free = workers.free_pages - workers.reserved_tokens / workers.page_size
        kv_free = 100.0 * np.maximum(free, 0.0) / np.maximum(workers.total_pages, 1.0)
        batch_room = np.maximum(workers.max_num_seqs - workers.num_active, 0.0)
        load = workers.num_active / workers.max_num_seqs
        return {
            "utilisation": config.prefix_score_utilisation_weight * load,
            "hit-tokens": -config.prefix_score_hit_weight * request.hit_tokens,
            "kv-free": -config.prefix_score_kv_free_weight * kv_free,
            "batch-room": -config.prefix_score_batch_room_weight * batch_room,
        }


class LeastLoadPolicy(RoutingPolicy):
    """cost = seconds of prompts before it, plus a step for a full batch."""

    tolerance = TOLERANCE

    def terms(
        self, request: RequestView, estimate: Estimate, workers: WorkerTable, now: float
    ) -> Terms:
        """Seconds by worker; see RoutingPolicy.terms."""
        batch_s = workers.step_s * workers.num_active / workers.max_num_seqs
        return {"queue": workers.waiting_s(now), "batch": batch_s}


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


class RoundRobinPolicy(RoutingPolicy):
    """The worker that has waited longest for a request."""

    def terms(
        self, request: RequestView, estimate: Estimate, workers: WorkerTable, now: float
    ) -> Terms:
        """Ranks of workers by when they were chosen last; see RoutingPolicy.terms."""
        # Ranks rather than counts, which grow: equal costs are a matter of proportion.
        return {"rank": workers.last_chosen.argsort(kind="stable").argsort().astype(np.float64)}


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
