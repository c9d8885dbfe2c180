"""Copies of requests' states at the ends of cached prefixes, for models whose layers keep one."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from worker.core.cache.fence import Fence
from worker.core.cache.pool import FencedPool
from worker.plan.plan import StateLoad


class PendingSnapshot(NamedTuple):
    """One that a step in flight stores."""

    position: int
    """Positions that the state has seen: whole pages."""
    snapshot: int
    is_kept: bool
    """Whether it stays when the lease has a later one."""


class _Load(NamedTuple):
    """A copy that the next Plan is to make."""

    page: int
    snapshot: int


class SnapshotPool:
    """Which snapshot belongs to which cached page: it is the state at the page's end.

        free ──take──> pending ──attach──> of a page ──┬─ least recently used: taken again
                          └── its lease ends: free     └─ its page leaves the cache: free

    Every lease has a state of its own besides, in its slot, of which nothing is to be known here.
    Snapshots are kept as there is room for them: without one a prefix is computed again.

    Args:
        count: how many there are.
    """

    def __init__(self, count: int) -> None:
        self._pool = FencedPool(0, count)
        self._of_page: OrderedDict[int, int] = OrderedDict()
        """By page, its snapshot; the least recently used first."""
        self._rolling: set[int] = set()
        """Pages whose snapshots their leases give up for later ones; asked for membership only."""
        self._loads: dict[int, _Load] = {}
        """By slot, what the next Plan loads."""
        self._readers: Counter[int] = Counter()
        """By snapshot: loads that were planned and have not completed."""
        self._fence: Fence[int] = Fence()
        """Snapshots that steps in flight load."""

    def longest_hit(self, pages: Sequence[int]) -> int:
        """How many of the pages of a cached prefix a request can go on from."""
        count = len(pages)
        while count and pages[count - 1] not in self._of_page:
            count -= 1
        return count

    def take(self) -> int | None:
        """One that a step is to store; None where all are being written or read."""
        if not self._pool.num_free:
            for page, snapshot in self._of_page.items():
                if not self._readers[snapshot]:
                    self._drop(page)
                    break
            else:
                return None
        return self._pool.take(1)[0]

    def attach(self, page: int, pending: PendingSnapshot) -> bool:
        """A step has stored one for a page of the cache; whether the page had none."""
        if page in self._of_page:
            if pending.is_kept:
                self._rolling.discard(page)
            self._pool.release([pending.snapshot], 0)
            return False
        self._of_page[page] = pending.snapshot
        if not pending.is_kept:
            self._rolling.add(page)
        return True

    def give_up(self, page: int) -> None:
        """Frees the snapshot of a page whose lease has a later one, unless others went on from
        it."""
        snapshot = self._of_page.get(page)
        if snapshot is not None and page in self._rolling and not self._readers[snapshot]:
            self._drop(page)

    def keep(self, page: int) -> None:
        """The lease has ended: what it left at this page is the last of it."""
        self._rolling.discard(page)

    def load(self, page: int, slot: int) -> None:
        """Has the next Plan copy a page's snapshot into the state of a slot."""
        snapshot = self._of_page[page]
        self._of_page.move_to_end(page)
        self._rolling.discard(page)
        self._readers[snapshot] += 1
        self._loads[slot] = _Load(page, snapshot)

    def cancel(self, slot: int) -> None:
        """A slot comes free: what no Plan has loaded into it yet, none does."""
        load = self._loads.pop(slot, None)
        if load is not None:
            self._end_read(load.snapshot)

    def take_loads(self, seq: int) -> list[StateLoad]:
        """What Plan `seq` loads."""
        loads, self._loads = self._loads, {}
        for load in loads.values():
            self._fence.hold(load.snapshot, seq)
        return [StateLoad(slot, load.snapshot) for slot, load in loads.items()]

    def release(self, snapshots: Iterable[int], fence: int) -> None:
        """Frees pending ones once step `fence`, the last that stores them, has completed."""
        self._pool.release(snapshots, fence)

    def forget(self, pages: Iterable[int]) -> None:
        """Frees the snapshots of pages that have left the cache; no step in flight reads them."""
        for page in pages:
            if page in self._of_page:
                assert not self._readers[self._of_page[page]], "its page is not locked"
                self._drop(page)

    def complete(self, seq: int) -> None:
        """Notes that step `seq` has completed."""
        self._pool.complete(seq)
        for snapshot in self._fence.complete(seq):
            self._end_read(snapshot)

    def check_invariants(self, pending: Iterable[int], cached: Collection[int]) -> None:
        """Asserts that these are all pending ones, that every other is free or of a page in
        `cached`, and that loads are counted."""
        self._pool.check_invariants([*self._of_page.values(), *pending])
        assert set(self._of_page) <= set(cached), "a snapshot of a page that is not cached"
        assert self._rolling <= set(self._of_page), "a page without a snapshot gives one up"
        waiting = [load.snapshot for load in self._loads.values()]
        assert Counter([*waiting, *self._fence]) == +self._readers, "loads miscounted"
        assert all(load.page in self._of_page for load in self._loads.values()), "nothing to load"

    def _drop(self, page: int) -> None:
        self._rolling.discard(page)
        self._pool.release([self._of_page.pop(page)], 0)

    def _end_read(self, snapshot: int) -> None:
        self._readers[snapshot] -= 1
        if not self._readers[snapshot]:
            del self._readers[snapshot]
