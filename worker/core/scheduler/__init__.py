"""Decides each step: `Scheduler.schedule()` emits a Plan, `Scheduler.apply()` takes its result."""

from worker.core.scheduler.block_policy import BlockPolicy
from worker.core.scheduler.block_scheduler import BlockScheduler
from worker.core.scheduler.config import SchedulerConfig
from worker.core.scheduler.scheduler import Clock, Scheduler
from worker.core.speculation.gate import SpeculationGate


def create_scheduler(
    config: SchedulerConfig, clock: Clock, speculation: SpeculationGate | None = None
) -> Scheduler:
    """The scheduler for the kind of model that the configuration tells of.

    Args:
        config: limits of the worker group.
        clock: the time.
        speculation: decides on drafts, of an autoregressive model; None drafts nothing.
    """
    if config.blocks is None:
        return Scheduler(config, clock, speculation)
    assert speculation is None, "drafts for a block-diffusion model are refused when it is loaded"
    return BlockScheduler(config, clock)


__all__ = ["BlockPolicy", "Clock", "Scheduler", "SchedulerConfig", "create_scheduler"]
