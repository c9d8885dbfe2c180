"""Pool of numbered resources (pages, slots), each with one owner."""

from __future__ import annotations

from collections.abc import Iterable

from worker.core.cache.fence import CompletedSteps, Fence


class FencedPool:
    """Pool of ids from `first` to `first + count - 1`, each of which is free, fenced, or taken by
    exactly one owner.

    Args:
        first: lowest id; 1 for pages, since page 0 is the dummy page for padding writes.
        count: number of ids.
        steps: the completed steps.
    """

    def __init__(self, first: int, count: int, steps: CompletedSteps) -> None:
        self.first = first
        self.count = count
        self.free = list(range(first + count - 1, first - 1, -1))
        """Ids available to `take`, which pops from the end: lowest ids first in a new pool, then
        the most recently released first."""
        self._fence = Fence(steps, self.free.append)

    @property
    def num_free(self) -> int:
        """Number of ids available to `take`."""
        return len(self.free)

    @property
    def num_fenced(self) -> int:
        """Number of ids waiting for a step in flight."""
        return len(self._fence)

    def passed(self, fence: int) -> bool:
        """Whether step `fence` has completed."""
        return self._fence.passed(fence)

    def take(self, count: int) -> list[int]:
        """Takes `count` ids; the caller must check that enough are free."""
        assert count <= len(self.free), f"{count} requested, {len(self.free)} free"
        if count == 1:
            return [self.free.pop()]
        taken = self.free[len(self.free) - count :]
        del self.free[len(self.free) - count :]
        taken.reverse()
        return taken

    def release(self, ids: Iterable[int], fence: int) -> None:
        """Releases ids. They can be taken again once step `fence`, the last one that uses them, has
        completed."""
        if self._fence.passed(fence):
            self.free.extend(ids)
            return
        for item in ids:
            self._fence.hold(item, fence)

    def check_invariants(self, out: Iterable[int]) -> None:
        """Asserts that each id is free, fenced or in `out`, exactly once."""
        everything = [*self.free, *self._fence, *out]
        assert len(everything) == self.count, f"{len(everything)} ids, {self.count} expected"
        expected = list(range(self.first, self.first + self.count))
        assert sorted(everything) == expected, "an id is missing or has two owners"
