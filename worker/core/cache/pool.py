"""A pool of numbered resources (pages, slots) with one owner each and one way back."""

from __future__ import annotations

from collections.abc import Iterable

from worker.core.cache.fence import Fence


class FencedPool:
    """Ids first .. first + count - 1, each free, fenced, or out with exactly one owner.

    Args:
        first: lowest id; 1 for pages, whose page 0 is the dummy that padding writes to.
        count: how many ids there are.
    """

    def __init__(self, first: int, count: int) -> None:
        self.first = first
        self.count = count
        # Popped from the end: lowest ids first when fresh, then the most recently released.
        self._free = list(range(first + count - 1, first - 1, -1))
        self._fence: Fence[int] = Fence()

    @property
    def num_free(self) -> int:
        """Ids that `take` can hand out now."""
        return len(self._free)

    @property
    def num_fenced(self) -> int:
        """Ids that wait for a step in flight."""
        return len(self._fence)

    def passed(self, fence: int) -> bool:
        """Whether step `fence` has completed."""
        return self._fence.passed(fence)

    def take(self, count: int) -> list[int]:
        """Hands out `count` ids; the caller has checked that so many are free."""
        assert count <= len(self._free), f"{count} wanted, {len(self._free)} free"
        if count == 1:
            return [self._free.pop()]
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        taken.reverse()
        return taken

    def release(self, ids: Iterable[int], fence: int) -> None:
        """Takes ids back; usable once step `fence`, the last that touched them, has completed."""
        if self._fence.passed(fence):
            self._free.extend(ids)
            return
        for item in ids:
            self._fence.hold(item, fence)

    def complete(self, seq: int) -> None:
        """Frees the ids that waited for steps up to `seq`."""
        self._free.extend(self._fence.complete(seq))

    def check_invariants(self, out: Iterable[int]) -> None:
        """Asserts that the free, the fenced and the ids in `out` are all ids, each once."""
        everything = [*self._free, *self._fence, *out]
        assert len(everything) == self.count, f"{len(everything)} ids, {self.count} expected"
        expected = list(range(self.first, self.first + self.count))
        assert sorted(everything) == expected, "an id is missing or has two owners"
