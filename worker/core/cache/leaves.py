"""Leaves of the radix tree in eviction order: lowest rank first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from worker.core.cache.node import Node


class Leaves:
    """Heap of leaves that are candidates for eviction.

    Entries become stale when their nodes change. Stale entries are skipped when popped, and removed
    when there are more entries than nodes.

    Args:
        can_evict: whether a node can be evicted now.
    """

    def __init__(self, can_evict: Callable[[Node], bool]) -> None:
        self._can_evict = can_evict
        self._heap: list[tuple[float, int, Node]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, node: Node, num_nodes: int) -> None:
        """Adds a candidate; `num_nodes` is the number of nodes in the tree."""
        if len(self._heap) > 2 * num_nodes + 64:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapify(self._heap)
        heappush(self._heap, (node.rank, node.serial, node))

    def pop(self) -> Node | None:
        """Removes and returns the evictable leaf with the lowest rank; None if there is none."""
        while self._heap:
            entry = heappop(self._heap)
            if self._is_live(entry):
                return entry[2]
        return None

    def serials(self) -> Iterator[int]:
        """Serial numbers of all candidates, including stale entries."""
        return (serial for _, serial, _ in self._heap)

    def _is_live(self, entry: tuple[float, int, Node]) -> bool:
        rank, _, node = entry
        return node.rank == rank and node.parent is not None and self._can_evict(node)
