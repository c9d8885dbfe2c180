"""What the workers of a fleet that are ready have in common."""

from __future__ import annotations

from typing import TypeVar

from router.fleet.blocks import BlockKey
from worker.wire.limits import Limits
from worker.wire.messages import EngineInfo

Kind = TypeVar("Kind", BlockKey, Limits)


class Members:
    """Counts the ready workers by kind, so that a request is looked at once per kind of worker."""

    def __init__(self) -> None:
        self.keys: dict[BlockKey, int] = {}
        """How they hash blocks."""
        self.limits: dict[Limits, int] = {}
        """What they can run."""

    @property
    def number(self) -> int:
        """Workers that are ready."""
        return sum(self.keys.values())

    def change(self, before: EngineInfo | None, after: EngineInfo | None) -> None:
        """A worker had loaded `before` and now has `after`; None for one that is not ready."""
        if after is not None:
            _count(self.keys, BlockKey.of(after), 1)
            _count(self.limits, Limits.of(after), 1)
        if before is not None:
            _count(self.keys, BlockKey.of(before), -1)
            _count(self.limits, Limits.of(before), -1)


def _count(counts: dict[Kind, int], kind: Kind, change: int) -> None:
    counts[kind] = counts.get(kind, 0) + change
    if not counts[kind]:
        del counts[kind]
