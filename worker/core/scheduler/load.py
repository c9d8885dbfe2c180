"""Load snapshot of a worker, sent with every report."""

from __future__ import annotations

from msgspec.structs import replace

from worker.core.scheduler.state import SchedulerState
from worker.protocol.messages import LoadSnapshot
from worker.protocol.speculation import SpeculationTotals


def snapshot(
    state: SchedulerState,
    *,
    retry_after_s: int,
    speculation: SpeculationTotals | None,
    new_prompt_share: float,
) -> LoadSnapshot:
    """Current load; takes one pass over the running set.

    Args:
        state: the scheduler's state.
        retry_after_s: estimated seconds until the waiting requests have been admitted.
        speculation: totals of drafts; None without speculative decoding.
        new_prompt_share: fraction of a step's prompt tokens that running prefills leave to new
            requests.
    """
    queue, cache, stats = state.queue, state.cache, state.stats
    to_prefill = attended = 0
    for request in state.running:
        left = request.num_prefill - request.num_computed
        if left > 0:
            to_prefill += left
            attended += left * (request.num_computed + request.num_prefill) // 2
    return LoadSnapshot(
        num_running=len(state.running),
        num_waiting=queue.num_requests + len(state.held),
        num_free_pages=cache.num_allocatable,
        num_total_pages=cache.num_blocks,
        queued_prefill_tokens=queue.num_tokens + to_prefill,
        max_num_seqs=state.config.max_num_seqs,
        num_preemptions=stats.num_preemptions,
        step_ms=stats.step_ms,
        num_step_tokens=stats.num_step_tokens,
        num_submits_seen=stats.num_submits,
        speculation=speculation,
        step_shape=stats.step_shape,
        queued_cached_tokens=queue.num_expected_cached,
        num_queued_tokens=queue.num_tokens,
        least_queued_priority=queue.lowest_level if queue.num_requests else -1,
        retry_after_s=retry_after_s,
        blocks=None if stats.blocks is None else replace(stats.blocks),
        prefilling_attended=attended,
        new_prompt_share=new_prompt_share,
        host_cache=None if cache.host is None else cache.host.totals,
        num_prefix_queries=stats.num_prefix_queries,
        num_prefix_hits=stats.num_prefix_hits,
        prefill_steps=stats.prefill_steps,
    )
