"""Scheduler state: the requests, what they hold, and counters, shared by all its parts."""

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
from worker.protocol.messages import StepShape

Clock = Callable[[], float]
"""Seconds from some fixed moment, such as `time.monotonic`; the only time that decisions see."""


@dataclass(slots=True, kw_only=True)
class SchedulerStats:
    """Counters for load snapshots, since the scheduler began, and the last step's figures."""

    num_preemptions: int = 0
    """Requests preempted since the scheduler began."""
    num_prefix_queries: int = 0
    """Known tokens of requests when they were first admitted."""
    num_prefix_hits: int = 0
    """Tokens of `num_prefix_queries` that the prefix cache had."""
    num_dropped_tokens: int = 0
    """Tokens that the device drew for requests that had ended or been preempted meanwhile."""
    step_ms: float = 0.0
    """Milliseconds of the last completed step, or of its average pass over running blocks."""
    num_step_tokens: int = 0
    """Tokens computed in the last completed step, at most."""
    step_shape: StepShape = field(default_factory=StepShape)
    """Shape of the computation that took `step_ms`."""
    blocks: BlockTotals | None = None
    """Totals of block diffusion; None for an autoregressive model."""
    num_submits: int = 0
    """Submits received, ignored ones included."""


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
    """Virtual token counters of the tenants."""
    forecast: StepForecast
    """Forecast of step times."""
    requests: dict[str, Request] = field(default_factory=dict)
    """All requests that have not ended, by id."""
    held: dict[str, Request] = field(default_factory=dict)
    """Requests that wait for their grammar or for its next mask, by id."""
    drain: DrainRate = field(default_factory=DrainRate)
    """Drain rate of the queue."""
    stats: SchedulerStats = field(default_factory=SchedulerStats)
    """Counters of the scheduler."""
    outputs: OutputBuffer = field(default_factory=OutputBuffer)
    """Token deltas for the next report."""

    @classmethod
    def create(cls, config: SchedulerConfig, clock: Clock) -> Self:
        """The state of a new scheduler."""
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
