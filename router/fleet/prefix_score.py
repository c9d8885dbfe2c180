"""The reference policy: cached tokens first, load second, by fixed weights."""

from __future__ import annotations

import numpy as np

from router.config import RoutingConfig
from router.fleet.base import RoutingPolicy, Terms
from router.fleet.estimate import Estimate
from router.fleet.request_view import RequestView
from router.fleet.workers import WorkerTable


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
        room = np.maximum(workers.max_num_seqs - workers.num_active, 0.0)
        load = workers.num_active / workers.max_num_seqs
        return {
            "utilisation": config.prefix_score_utilisation_weight * load,
            "hit-tokens": -config.prefix_score_hit_weight * request.hit_tokens,
            "kv-free": -config.prefix_score_kv_free_weight * kv_free,
            "batch-room": -config.prefix_score_batch_room_weight * room,
        }
