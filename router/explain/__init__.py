"""Decision logs: written by gateways, read by `python -m deploy.benchmarks router --replay`."""

from router.explain.log import DecisionLog, read_decisions
from router.explain.record import Decided, FleetSpeed, LogLine, WorkerSeen

__all__ = ["Decided", "DecisionLog", "FleetSpeed", "LogLine", "WorkerSeen", "read_decisions"]
