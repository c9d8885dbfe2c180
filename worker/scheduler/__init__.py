"""Decides each step: `Scheduler.schedule()` emits a Plan, `Scheduler.apply()` takes its result."""

from worker.scheduler.config import SchedulerConfig
from worker.scheduler.scheduler import Clock, Scheduler

__all__ = ["Clock", "Scheduler", "SchedulerConfig"]
