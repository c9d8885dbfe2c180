"""Decides each step: `Scheduler.schedule()` emits a Plan, `Scheduler.apply()` takes its result."""
