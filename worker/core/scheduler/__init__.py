"""Decides each step: `Scheduler.schedule()` returns a Plan, `Scheduler.apply()` the effects of
its result."""

from worker.core.scheduler.config import SchedulerConfig
from worker.core.scheduler.scheduler import Scheduler
from worker.core.scheduler.state import Clock

__all__ = ["Clock", "Scheduler", "SchedulerConfig"]
