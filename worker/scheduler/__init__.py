"""Decides each step: `Scheduler.schedule()` emits a Plan, `Scheduler.apply()` takes its result."""

from worker.scheduler.block_policy import BlockPolicy
from worker.scheduler.block_scheduler import BlockScheduler
from worker.scheduler.config import SchedulerConfig
from worker.scheduler.scheduler import Clock, Scheduler


def create_scheduler(config: SchedulerConfig, clock: Clock) -> Scheduler:
    """The scheduler for the kind of model that the configuration tells of."""
    return Scheduler(config, clock) if config.blocks is None else BlockScheduler(config, clock)


__all__ = ["BlockPolicy", "Clock", "Scheduler", "SchedulerConfig", "create_scheduler"]
