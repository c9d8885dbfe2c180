"""Scheduler state, shared by all components of the scheduler: requests, their resources, and
counters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from worker.core.adapters import AdapterPool
from worker.core.cache.manager import CacheManager
from worker.core.request import Request
from worker.core.scheduler.adapter_gate import AdapterGate
from worker.core.scheduler.config import SchedulerConfig
from worker.core.scheduler.fairness import TenantService
from worker.core.scheduler.output_buffer import OutputBuffer
from worker.core.scheduler.overload import DrainRate
from worker.core.scheduler.queue import WaitingQueue
from worker.core.scheduler.running import RunningSet
from worker.core.scheduler.slo import Urgency
from worker.core.step_forecast import StepForecast
from worker.protocol.messages import LoadSnapshot

Clock = Callable[[], float]
"""Seconds since a fixed time, such as `time.monotonic`; the only clock used for decisions."""


@dataclass(slots=True, kw_only=True)
class SchedulerStats:
    """Counters since the scheduler was created, and metrics of the last step."""

    load: LoadSnapshot = field(default_factory=LoadSnapshot)
    """Counters, and metrics of the last step, for load snapshots. Updated in place; other fields
    keep their defaults."""
    num_dropped_tokens: int = 0
    """Number of tokens sampled for requests that had already ended or been preempted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerState:
    """Requests of a worker group, the sets that they are in, and their resources.

    Only `Lifecycle` and `Scheduler` move requests between the sets.
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
    adapters: AdapterGate | None
    """Requests that wait for their LoRA adapter; None if adapters are disabled."""
    requests: dict[str, Request] = field(default_factory=dict)
    """All requests that have not ended, by id."""
    held: dict[str, Request] = field(default_factory=dict)
    """Requests waiting for their grammar, its next mask or their adapter, by id."""
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
        adapters = None
        if config.max_loras:
            adapters = AdapterGate(AdapterPool(config.max_loras, config.max_cpu_loras))
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
            adapters=adapters,
        )
