"""What all parts of the scheduler work on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from worker.core.cache.manager import CacheManager
from worker.core.request import Request
from worker.core.scheduler.config import SchedulerConfig
from worker.core.scheduler.fairness import TenantService
from worker.core.scheduler.output_buffer import OutputBuffer
from worker.core.scheduler.overload import DrainRate
from worker.core.scheduler.queue import WaitingQueue
from worker.core.scheduler.running import RunningSet
from worker.core.scheduler.slo import Urgency
from worker.core.scheduler.step import StepInFlight
from worker.core.step_forecast import StepForecast
from worker.plan.plan import StepResult
from worker.wire.diffusion import BlockTotals
from worker.wire.messages import StepShape

Clock = Callable[[], float]
"""Seconds from some fixed moment, such as `time.monotonic`; the only time that decisions see."""


@dataclass(slots=True, kw_only=True)
class SchedulerStats:
    """What a snapshot reports that is not visible in the scheduler's present state."""

    num_preemptions: int = 0
    """Requests preempted since the scheduler began."""
    num_prefix_queries: int = 0
    """Tokens that requests came with, counted when they are first admitted."""
    num_prefix_hits: int = 0
    """Tokens of these that the prefix cache had."""
    num_dropped_tokens: int = 0
    """Tokens that the device drew for requests that had ended or been preempted meanwhile."""
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
        """A step has completed. One that turned out to have nothing to compute does not count."""
        if not result.num_forwards:
            return
        self.step_shape, self.step_ms = step.measured(result)
        self.num_step_tokens = step.num_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerState:
    """The requests of one worker group, where they are, and what they hold.

    `Lifecycle` alone moves requests; every other part reads, and writes what its docstring says.
    """

    config: SchedulerConfig
    clock: Clock
    cache: CacheManager
    """Pages and slots."""
    queue: WaitingQueue
    """Requests that wait for a slot."""
    running: RunningSet
    """Requests that have a slot."""
    tenants: TenantService
    """What each tenant has been served."""
    forecast: StepForecast
    """What steps take."""
    requests: dict[str, Request] = field(default_factory=dict)
    """All that have not ended, by id."""
    held: dict[str, Request] = field(default_factory=dict)
    """Requests whose grammar, or its next mask, is not here yet, by id."""
    drain: DrainRate = field(default_factory=DrainRate)
    """How fast the queue drains."""
    stats: SchedulerStats = field(default_factory=SchedulerStats)
    """Counters of the scheduler."""
    outputs: OutputBuffer = field(default_factory=OutputBuffer)
    """What the next report brings to gateways."""

    @classmethod
    def create(cls, config: SchedulerConfig, clock: Clock) -> Self:
        """The state of a scheduler that begins."""
        forecast, tenants = StepForecast(config.max_num_batched_tokens), TenantService()
        return cls(
            config=config,
            clock=clock,
            cache=CacheManager(
                num_pages=config.num_pages,
                page_size=config.page_size,
                num_slots=config.max_num_seqs,
                block_hash_salt=config.block_hash_salt,
                enable_prefix_caching=config.enable_prefix_caching,
                num_host_pages=config.num_host_pages,
                groups=config.page_groups,
                step_tokens=config.max_num_batched_tokens,
            ),
            queue=WaitingQueue(Urgency(config.deadline_margin_ms / 1e3, forecast), tenants),
            running=RunningSet(),
            tenants=tenants,
            forecast=forecast,
        )
