"""Which worker serves a request: prefix index, load, routing policies."""

from router.fleet.base import RoutingPolicy, WorkerState
from router.fleet.blocks import BlockKey, PromptBlocks
from router.fleet.factory import create_policy
from router.fleet.fleet import Choice, Fleet
from router.fleet.index import PrefixIndex

__all__ = [
    "BlockKey",
    "Choice",
    "Fleet",
    "PrefixIndex",
    "PromptBlocks",
    "RoutingPolicy",
    "WorkerState",
    "create_policy",
]
