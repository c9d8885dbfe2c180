"""Routing decisions of one model: prefix index, load of workers, routing policies."""

from router.fleet.base import Decision, RoutingPolicy
from router.fleet.batch_window import BatchWindow
from router.fleet.blocks import BlockKey, PromptBlocks
from router.fleet.explain import Explanation
from router.fleet.feasibility import Feasibility, RefusedGrammars
from router.fleet.fleet import Choice, Fleet
from router.fleet.index import PrefixIndex
from router.fleet.memo import HashMemo
from router.fleet.policies import create_policy
from router.fleet.request import RequestView
from router.fleet.state import WorkerState
from router.fleet.workers import WorkerTable

__all__ = [
    "BatchWindow",
    "BlockKey",
    "Choice",
    "Decision",
    "Explanation",
    "Feasibility",
    "Fleet",
    "HashMemo",
    "PrefixIndex",
    "PromptBlocks",
    "RefusedGrammars",
    "RequestView",
    "RoutingPolicy",
    "WorkerState",
    "WorkerTable",
    "create_policy",
]
