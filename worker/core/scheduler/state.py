"""Scheduler state: requests, their resources, and counters, shared by all its parts."""

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
from worker.core.step_forecast import StepForecast
from worker.protocol.diffusion import BlockTotals
from worker.protocol.messages import PrefillSteps, StepShape

Clock = Callable[[], float]
"""Seconds since some fixed time, such as `time.monotonic`; the only clock used for decisions."""


@dataclass(slots=True, kw_only=True)
class SchedulerStats:
    """Counters for load snapshots since the scheduler was created, and metrics of the last step."""

    num_preemptions: int = 0
    """Number of preemptions."""
    num_prefix_queries: int = 0
    """Known tokens of requests at their first admission."""
    num_prefix_hits: int = 0
    """Tokens of `num_prefix_queries` that were cached."""
    num_dropped_tokens: int = 0
    """Tokens sampled for requests that had already ended or been preempted."""
    step_ms: float = 0.0
    """Duration of the last step in milliseconds, or of its average pass over running blocks."""
    num_step_tokens: int = 0
    """Maximum number of tokens computed in the last step."""
    step_shape: StepShape = field(default_factory=StepShape)
    """Shape of the step that took `step_ms`."""
    prefill_steps: PrefillSteps = field(default_factory=PrefillSteps)
    """Totals of steps with prompt tokens."""
    blocks: BlockTotals | None = None
    """Totals of block diffusion; None for an autoregressive model."""
    num_submits: int = 0
    """Number of submits received, including ignored ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerState:
    """Requests of a worker group, their locations and resources.

    Only `Lifecycle` moves requests; all other parts read, and write what their docstrings say.
    """

    config: SchedulerConfig
    clock: Clock
    cache: CacheManager
    """Pages and slots."""
    queue: WaitingQueue
    """Requests waiting for a slot."""
    running: RunningSet
    """Requests with a slot."""
    tenants: TenantService
    """Virtual token counters of tenants."""
    forecast: StepForecast
    """Step-time forecast."""
    requests: dict[str, Request] = field(default_factory=dict)
    """All requests that have not ended, by id."""
    held: dict[str, Request] = field(default_factory=dict)
    """Requests waiting for their grammar or its next mask, by id."""
    drain: DrainRate = field(default_factory=DrainRate)
    """Drain rate of the queue."""
    stats: SchedulerStats = field(default_factory=SchedulerStats)
    """Counters of the scheduler."""
    outputs: OutputBuffer = field(default_factory=OutputBuffer)
    """Token deltas for the next report."""

    @classmethod
    def create(cls, config: SchedulerConfig, clock: Clock) -> Self:
        """State of a new scheduler."""
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
