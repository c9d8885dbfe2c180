"""Decides each step: `Scheduler.schedule()` emits a Plan, `Scheduler.apply()` takes its result."""

from worker.core.scheduler.block_policy import BlockPolicy
from worker.core.scheduler.config import SchedulerConfig
from worker.core.scheduler.scheduler import Scheduler
from worker.core.scheduler.state import Clock

__all__ = ["BlockPolicy", "Clock", "Scheduler", "SchedulerConfig"]
