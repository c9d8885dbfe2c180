"""Routing decisions of one model: prefix index, worker loads, routing policies."""

from router.fleet.batch_window import BatchWindow
from router.fleet.blocks import BlockKey, PromptBlocks
from router.fleet.explain import Explanation
from router.fleet.feasibility import Feasibility, RejectedGrammars
from router.fleet.fleet import Choice, Fleet
from router.fleet.session_gate import SessionGate, Visit
from router.fleet.session_list import ListedSession, SessionList
from router.fleet.state import WorkerState

__all__ = [
    "BatchWindow",
    "BlockKey",
    "Choice",
    "Explanation",
    "Feasibility",
    "Fleet",
    "ListedSession",
    "PromptBlocks",
    "RejectedGrammars",
    "SessionGate",
    "SessionList",
    "Visit",
    "WorkerState",
]
