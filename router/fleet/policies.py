"""The routing policies besides AdaptivePolicy, and `create_policy`, which creates any by name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from xxhash import xxh3_64_intdigest

from router.config import PolicyName, PrefixScoreConfig, RoutingConfig
from router.fleet.adaptive import AdaptivePolicy
from router.fleet.base import RoutingPolicy, Terms, rendezvous
from router.fleet.constants import TOLERANCE
from router.fleet.request import Estimate, RequestView
from router.fleet.utilisation import Utilisation
from router.fleet.workers import WorkerTable


def create_policy(config: RoutingConfig, utilisation: Utilisation) -> RoutingPolicy:
    """The routing policy named in `config`. Raises ValueError, listing known names, for other
    names."""
    policies: dict[PolicyName, Callable[[], RoutingPolicy]] = {
        "adaptive": lambda: AdaptivePolicy(utilisation),
        "prefix-score": lambda: PrefixScorePolicy(config.prefix_score),
        "least-load": LeastLoadPolicy,
        "power-of-two": PowerOfTwoPolicy,
        "round-robin": RoundRobinPolicy,
        "session": SessionPolicy,
    }
    if config.routing_policy not in policies:
        raise ValueError(
            f"unknown routing policy {config.routing_policy}: choose from {', '.join(policies)}"
        )
    return policies[config.routing_policy]()


class PrefixScorePolicy(RoutingPolicy):
    """Chooses the worker with the highest weighted score of cache hits and free capacity.

    With default weights, score = hit_tokens·10 − utilisation·100 + kv_free·0.1 + batch_room·0.5.

    - hit_tokens: leading prompt tokens in the worker's prefix cache;
    - utilisation: requests on the worker (running, waiting, sent) per batch slot; above 1, requests
      wait;
    - kv_free: percent of KV pages free or evictable, minus those needed by requests just sent;
    - batch_room: free slots of the batch.

    Args:
        weights: the four weights.
    """

    def __init__(self, weights: PrefixScoreConfig) -> None:
        self._weights = weights

    def terms(
        self, request: RequestView, estimate: Estimate, workers: WorkerTable, now: float
    ) -> Terms:
        """The score, negated, as a sum of terms; see RoutingPolicy.terms."""
        weights = self._weights
        free = workers.free_pages - workers.reserved_tokens / workers.page_size
        kv_free = 100.0 * np.maximum(free, 0.0) / np.maximum(workers.total_pages, 1.0)
        batch_room = np.maximum(workers.max_num_seqs - workers.num_active, 0.0)
        load = workers.num_active / workers.max_num_seqs
        return {
            "utilisation": weights.utilisation_weight * load,
            "hit-tokens": -weights.hit_weight * request.hit_tokens,
            "kv-free": -weights.kv_free_weight * kv_free,
            "batch-room": -weights.batch_room_weight * batch_room,
        }


class LeastLoadPolicy(RoutingPolicy):
    """Chooses the least loaded worker.

    cost = seconds to compute the prompts ahead + (active requests / batch slots)·step time.
    """

    tolerance = TOLERANCE

    def terms(
        self, request: RequestView, estimate: Estimate, workers: WorkerTable, now: float
    ) -> Terms:
        """The terms in seconds; see RoutingPolicy.terms."""
        batch_s = workers.step_s * workers.num_active / workers.max_num_seqs
        return {"queue": workers.waiting_s(now), "batch": batch_s}


class PowerOfTwoPolicy(LeastLoadPolicy):
    """Chooses the less loaded of two random workers (Mitzenmacher 2001, The power of two choices).

    This prevents gateways with the same stale reports from all choosing the same worker.
    """

    def __init__(self) -> None:
        self._num_placed = 0

    def observe(self, request: RequestView, work_s: float, now: float) -> None:
        """Makes the next request sample other workers; see RoutingPolicy.observe."""
        self._num_placed += 1

    def terms(
        self, request: RequestView, estimate: Estimate, workers: WorkerTable, now: float
    ) -> Terms:
        """The terms in seconds, infinite for workers not sampled; see RoutingPolicy.terms."""
        terms = super().terms(request, estimate, workers, now)
        rows = np.flatnonzero(request.eligible)
        if len(rows) <= 2:
            return terms
        # A random number per worker and request: the two greatest are sampled.
        numbers = rendezvous(workers.seeds[rows], self._num_placed)
        undrawn = np.full(len(workers.seeds), np.inf)
        undrawn[rows[numbers.argpartition(-2)[-2:]]] = 0.0
        return {**terms, "undrawn": undrawn}


class RoundRobinPolicy(RoutingPolicy):
    """Chooses the least recently chosen worker."""

    def terms(
        self, request: RequestView, estimate: Estimate, workers: WorkerTable, now: float
    ) -> Terms:
        """Ranks of workers by the time they were last chosen, 0 for the oldest; see
        RoutingPolicy.terms."""
        # Ranks, since workers that were never chosen must be chosen by row, not as ties.
        return {"rank": workers.last_chosen.argsort(kind="stable").argsort().astype(np.float64)}


class SessionPolicy(RoundRobinPolicy):
    """Chooses a worker by rendezvous hashing of the session id.

    If a worker leaves, only its own sessions move. Requests without a session go to the least
    recently chosen worker.
    """

    def terms(
        self, request: RequestView, estimate: Estimate, workers: WorkerTable, now: float
    ) -> Terms:
        """Ranks of workers by their rendezvous hash with the session; see RoutingPolicy.terms."""
        if not request.session:
            return super().terms(request, estimate, workers, now)
        values = rendezvous(workers.seeds, xxh3_64_intdigest(request.session.encode()))
        return {"rank": (~values).argsort(kind="stable").argsort().astype(np.float64)}
