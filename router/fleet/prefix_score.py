"""Prefix hits against load, in one weighted sum."""

from __future__ import annotations

from router.fleet.base import RoutingPolicy, WorkerState
from worker.wire.messages import EngineInfo


class PrefixScorePolicy(RoutingPolicy):
    """score = hit_tokens·10 − utilisation·100 + kv_free·0.1 + batch_room·0.5.

    - hit_tokens: leading prompt tokens in the worker's prefix cache;
    - utilisation: requests there (running, waiting, on their way) per place in its batch; 1 is a
      full batch, more means that requests wait;
    - kv_free: percent of KV pages free or evictable, less what requests on their way will need;
    - batch_room: places free in the batch.
    """

    def score(self, worker: WorkerState, info: EngineInfo, hit_tokens: int) -> float:
        """See RoutingPolicy."""
        load = worker.load
        places = max(load.max_num_seqs or info.max_num_seqs, 1)
        utilisation = worker.num_active / places
        kv_free = 0.0
        if load.num_total_pages:
            free = load.num_free_pages - worker.reserved_tokens / info.page_size
            kv_free = 100.0 * max(free, 0.0) / load.num_total_pages
        batch_room = max(places - worker.num_active, 0)
        return hit_tokens * 10.0 - utilisation * 100.0 + kv_free * 0.1 + batch_room * 0.5
