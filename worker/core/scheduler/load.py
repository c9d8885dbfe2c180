"""How busy the worker is, told with every report."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from worker.core.cache.manager import CacheManager
from worker.core.scheduler.config import SchedulerConfig
from worker.core.scheduler.queue import WaitingQueue
from worker.core.scheduler.running import RunningSet
from worker.core.scheduler.step import StepInFlight
from worker.plan.plan import StepResult
from worker.wire.diffusion import BlockTotals
from worker.wire.messages import LoadSnapshot, StepShape
from worker.wire.speculation import SpeculationTotals


@dataclass(slots=True, kw_only=True)
class Tally:
    """What a snapshot tells that is not visible in the scheduler's present state."""

    num_preemptions: int = 0
    """Requests taken back since the scheduler began."""
    num_dropped_tokens: int = 0
    """Tokens that the device drew for requests that had ended or been taken back meanwhile."""
    step_ms: float = 0.0
    """Time of the last completed step."""
    num_step_tokens: int = 0
    """Tokens computed in the last completed step."""
    step_shape: StepShape = field(default_factory=StepShape)
    """What that step computed."""
    blocks: BlockTotals | None = None
    """Of a block-diffusion model."""
    num_submits: int = 0
    """Submits since the scheduler began, those that were ignored included."""

    def observe(self, step: StepInFlight, result: StepResult) -> None:
        """A step has completed. One that turned out to have nothing to compute tells nothing."""
        if not result.num_forwards:
            return
        self.step_shape, self.step_ms = step.measured(result)
        self.num_step_tokens = step.num_tokens


def snapshot(
    config: SchedulerConfig,
    queue: WaitingQueue,
    running: RunningSet,
    cache: CacheManager,
    tally: Tally,
    num_held: int,
    retry_after_s: int,
    speculation: SpeculationTotals | None,
    new_prompt_share: float,
) -> LoadSnapshot:
    """The load as it stands; cost is one pass over the running set."""
    to_prefill = attended = 0
    for request in running:
        left = request.num_prefill - request.num_computed
        if left > 0:
            to_prefill += left
            attended += left * (request.num_computed + request.num_prefill) // 2
    return LoadSnapshot(
        num_running=len(running),
        num_waiting=len(queue) + num_held,
        num_free_pages=cache.num_available,
        num_total_pages=config.num_pages - 1,
        queued_prefill_tokens=queue.num_tokens + to_prefill,
        max_num_seqs=config.max_num_seqs,
        num_preemptions=tally.num_preemptions,
        step_ms=tally.step_ms,
        num_step_tokens=tally.num_step_tokens,
        num_submits_seen=tally.num_submits,
        speculation=speculation,
        step_shape=tally.step_shape,
        queued_cached_tokens=queue.num_expected_cached,
        num_queued_tokens=queue.num_tokens,
        least_queued_priority=queue.least_level,
        retry_after_s=retry_after_s,
        blocks=None if tally.blocks is None else replace(tally.blocks),
        prefilling_attended=attended,
        new_prompt_share=new_prompt_share,
        host_cache=None if cache.host is None else cache.host.totals,
    )
