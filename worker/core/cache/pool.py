"""Pool of numbered resources (pages, slots), each with one owner."""

from __future__ import annotations

from collections.abc import Iterable

from worker.core.cache.fence import Fence


class FencedPool:
    """Ids first .. first + count - 1, each free, fenced, or taken by exactly one owner.

    Args:
        first: lowest id; 1 for pages, since page 0 is the dummy page for padding writes.
        count: number of ids.
    """

    def __init__(self, first: int, count: int) -> None:
        self.first = first
        self.count = count
        # Popped from the end: lowest ids first in a new pool, then the most recently released.
        self._free = list(range(first + count - 1, first - 1, -1))
        self._fence: Fence[int] = Fence()

    @property
    def num_free(self) -> int:
        """Number of ids available to `take`."""
        return len(self._free)

    @property
    def num_fenced(self) -> int:
        """Ids waiting for a step in flight."""
        return len(self._fence)

    def passed(self, fence: int) -> bool:
        """Whether step `fence` has completed."""
        return self._fence.passed(fence)

    def take(self, count: int) -> list[int]:
        """Takes `count` ids; the caller has checked that enough are free."""
        assert count <= len(self._free), f"{count} requested, {len(self._free)} free"
        if count == 1:
            return [self._free.pop()]
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        taken.reverse()
        return taken

    def release(self, ids: Iterable[int], fence: int) -> None:
        """Returns ids; reusable once step `fence`, the last that uses them, has completed."""
        if self._fence.passed(fence):
            self._free.extend(ids)
            return
        for item in ids:
            self._fence.hold(item, fence)

    def complete(self, seq: int) -> None:
        """Frees the ids that waited for steps up to `seq`."""
        self._free.extend(self._fence.complete(seq))

    def check_invariants(self, out: Iterable[int]) -> None:
        """Asserts that each id is free, fenced or in `out`, exactly once."""
        everything = [*self._free, *self._fence, *out]
        assert len(everything) == self.count, f"{len(everything)} ids, {self.count} expected"
        expected = list(range(self.first, self.first + self.count))
        assert sorted(everything) == expected, "an id is missing or has two owners"
