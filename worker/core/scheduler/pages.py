"""The pages there are, and how many requests take."""

from __future__ import annotations

from worker.core.cache.manager import CacheManager
from worker.core.request import Request
from worker.core.scheduler.config import SchedulerConfig


def create_cache(config: SchedulerConfig) -> CacheManager:
    """The bookkeeping of all pages and slots."""
    return CacheManager(
        num_pages=config.num_pages,
        page_size=config.page_size,
        num_slots=config.max_num_seqs,
        block_hash_salt=config.block_hash_salt,
        enable_prefix_caching=config.enable_prefix_caching,
        num_host_pages=config.num_host_pages,
    )


def num_still_needed(request: Request, page_size: int) -> int:
    """Pages a running request will take to compute all its known tokens and a page beyond."""
    assert request.lease is not None
    num_tokens = min(request.limit, len(request.token_ids) + page_size)
    return max(0, -(-num_tokens // page_size) - len(request.lease.pages))
