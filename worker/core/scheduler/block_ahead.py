"""Overlap of block-diffusion steps: rows that are planned while the step before is in flight."""

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
    """Range that a request may compute after a step whose outcome is open."""

    request: Request
    lease: Lease
    start: int
    """First position of the running block."""
    end: int
    """End of the next block, or of the running one where that is the request's last."""
    num_missing: int
    """Pages that the lease lacks for the range."""


def rows_ahead(
    step: StepInFlight, running: RunningSet, cache: CacheManager, config: SchedulerConfig
) -> list[AheadRow]:
    """Rows of the step after `step`; none where what comes next depends on how that ends.

    A running block may be done by then or not, or its request ended. Ranks know which, and place
    each row accordingly; a row of a request that has ended computes nothing. So a step can be
    planned ahead where nothing else is open: all running requests have a running block in `step`,
    none is under a grammar, and there are pages and tokens for the most that they may take. The
    caller checks that no request waits.
    """
    policy = config.blocks
    assert policy is not None, "an autoregressive model has no blocks"
    current = [one for one in step.rows if not one.is_stale]
    if not (policy.inplace and policy.fused_commit) or len(current) < len(running):
        return []
    if not all(isinstance(one.row, BlockRow) and one.request.grammar is None for one in current):
        return []
    rows = [_row(one.request, one.lease, policy, config.page_size) for one in current]
    num_tokens = sum(row.end - row.start for row in rows)
    num_missing = sum(row.num_missing for row in rows)
    if num_tokens > config.max_num_batched_tokens or num_missing > cache.num_allocatable:
        return []
    return rows


def _row(request: Request, lease: Lease, policy: BlockPolicy, page_size: int) -> AheadRow:
    known_end = request.num_wanted
    end = known_end + policy.size if known_end < request.limit else known_end
    num_missing = max(0, -(-end // page_size) - len(lease.pages))
    return AheadRow(request, lease, known_end - policy.size, end, num_missing)
