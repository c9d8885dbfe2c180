"""Decision logs: written by gateways, read by `python -m deploy.benchmarks router --replay`."""

from router.explain.log import DecisionLog, read_decisions
from router.explain.record import DecisionLine, FleetSpeed, LogLine, WorkerSeen

__all__ = ["DecisionLine", "DecisionLog", "FleetSpeed", "LogLine", "WorkerSeen", "read_decisions"]
