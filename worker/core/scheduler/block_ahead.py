"""Overlap of block-diffusion steps: rows planned while the previous step is in flight."""

from __future__ import annotations

from typing import NamedTuple

from worker.core.cache.lease import Lease
from worker.core.cache.manager import CacheManager
from worker.core.request import Request
from worker.core.scheduler.block_policy import BlockPolicy
from worker.core.scheduler.config import SchedulerConfig
from worker.core.scheduler.running import RunningSet
from worker.core.scheduler.step import StepInFlight
from worker.plan.plan import BlockRow


class AheadRow(NamedTuple):
    """Range of positions that a request may compute after a step whose outcome is not known yet."""

    request: Request
    lease: Lease
    start: int
    """First position of the running block."""
    end: int
    """End of the next block, or of the running one if it is the request's last."""
    num_missing: int
    """Number of additional pages that the lease needs for the range."""


def rows_ahead(
    step: StepInFlight, running: RunningSet, cache: CacheManager, config: SchedulerConfig
) -> list[AheadRow]:
    """Rows of the step after `step`; empty if the next step depends on its outcome.

    When these rows run, the running block may be finished, and its request may have ended. Ranks
    can determine this and set each row's positions accordingly; a row of a request that has ended
    computes nothing. A step can therefore be planned ahead if nothing else is undecided: all
    running requests have a running block in `step`, none has a grammar, and there are enough pages
    and tokens for every outcome. The caller must check that no request is waiting.
    """
    policy = config.blocks
    assert policy is not None, "the model is autoregressive"
    current = [planned for planned in step.rows if not planned.is_stale]
    if not (policy.inplace and policy.fused_commit) or len(current) < len(running):
        return []
    if not all(isinstance(p.row, BlockRow) and p.request.grammar is None for p in current):
        return []
    rows = [_row(p.request, p.lease, policy, config.page_size) for p in current]
    num_tokens = sum(row.end - row.start for row in rows)
    num_missing = sum(row.num_missing for row in rows)
    if num_tokens > config.max_num_batched_tokens or num_missing > cache.num_allocatable:
        return []
    return rows


def _row(request: Request, lease: Lease, policy: BlockPolicy, page_size: int) -> AheadRow:
    known_end = request.num_to_compute
    end = known_end + policy.size if known_end < request.limit else known_end
    num_missing = max(0, -(-end // page_size) - len(lease.pages))
    return AheadRow(request, lease, known_end - policy.size, end, num_missing)
