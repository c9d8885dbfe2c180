"""The reference policy: cached tokens first, load second, by fixed weights."""

from __future__ import annotations

import numpy as np

from router.config import RoutingConfig
from router.fleet.base import RequestView, RoutingPolicy
from router.fleet.workers import Floats, WorkerTable


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

    def costs(self, request: RequestView, workers: WorkerTable, now: float) -> Floats:
        """The score with its sign turned."""
        config = self._config
        free = workers.free_pages - workers.reserved_tokens / workers.page_size
        kv_free = 100.0 * np.maximum(free, 0.0) / np.maximum(workers.total_pages, 1.0)
        room = np.maximum(workers.max_num_seqs - workers.num_active, 0.0)
        return (
            config.prefix_score_utilisation_weight * workers.num_active / workers.max_num_seqs
            - config.prefix_score_hit_weight * request.hit_tokens
            - config.prefix_score_kv_free_weight * kv_free
            - config.prefix_score_batch_room_weight * room
        )
