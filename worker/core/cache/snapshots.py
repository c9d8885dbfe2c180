"""Snapshots of linear-attention states at the ends of cached prefixes, from which requests
continue."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from worker.core.cache.fence import CompletedSteps, Fence
from worker.core.cache.host import HostPool
from worker.core.cache.host_snapshots import HostSnapshots, Place
from worker.core.cache.pool import FencedPool
from worker.plan.plan import StateLoad


class PendingSnapshot(NamedTuple):
    """A snapshot being stored by a step in flight."""

    position: int
    """Number of positions included in the state: a multiple of the page size."""
    snapshot: int
    """Number of the snapshot in the pool."""
    is_kept: bool
    """Whether the snapshot is kept after its lease has stored a later one."""
    seq: int = 0
    """Number of the step that stores the snapshot."""


class _Load(NamedTuple):
    """Copy of a snapshot to a slot, made with the next Plan."""

    page: int
    snapshot: int


class SnapshotPool:
    """Pool of snapshots, each attached to a cached page: the state at the end of the page.

        free ──take──> pending ──attach──> attached ──┬─ least recently used: taken again
                          └── its lease ends: free    └─ its page is evicted: free

    The state of each running request is in its slot and not managed here. Snapshots are kept while
    there is room; a prefix without one is recomputed. With a host-memory tier, snapshots are copied
    there before they are reused or freed with their page.

    Args:
        count: number of snapshots.
        steps: the completed steps.
        host: snapshots in host memory; None if that tier is disabled.
    """

    def __init__(
        self, count: int, steps: CompletedSteps, host: HostSnapshots | None = None
    ) -> None:
        self.host = host
        self._pool = FencedPool(0, count, steps)
        self._of_page: OrderedDict[int, int] = OrderedDict()
        """Snapshots by page, least recently used first."""
        self._rolling: set[int] = set()
        """Pages whose snapshots are freed when their leases have later ones."""
        self._loads: dict[int, _Load] = {}
        """Loads for the next Plan, by slot."""
        self._readers: Counter[int] = Counter()
        """Number of planned loads that have not completed, by snapshot."""
        self._fence = Fence(steps, self._end_read)
        """Snapshots being loaded by steps in flight."""

    def longest_hit(self, pages: Sequence[int], slots: Sequence[int] = ()) -> int:
        """Number of leading pages of a cached prefix up to the last snapshot in it.

        Args:
            pages: pages on the device.
            slots: slots of the following pages, which are in host memory.
        """
        if self.host is not None:
            for index in range(len(slots), 0, -1):
                if Place(True, slots[index - 1]) in self.host:
                    return len(pages) + index
        count = len(pages)
        while count and not self._has(pages[count - 1]):
            count -= 1
        return count

    def take(self) -> int | None:
        """Takes a snapshot for a step to store, evicting if necessary; None if all are in use."""
        if not self._pool.num_free:
            for page, snapshot in self._of_page.items():
                if not self._readers[snapshot]:
                    if self.host is not None and page not in self._rolling:
                        self.host.store(snapshot, Place(False, page))
                    self._drop(page)
                    break
            else:
                return None
        return self._pool.take(1)[0]

    def attach(self, page: int, pending: PendingSnapshot) -> bool:
        """Attaches a stored snapshot to a cached page. If the page already has one, frees the new
        snapshot and returns False."""
        if page in self._of_page:
            if pending.is_kept:
                self._rolling.discard(page)
            self._pool.release([pending.snapshot], 0)
            return False
        self._of_page[page] = pending.snapshot
        if not pending.is_kept:
            self._rolling.add(page)
        return True

    def drop_rolling(self, page: int) -> None:
        """Frees the snapshot of a page whose lease has a later one, unless another request uses it
        or has continued from it."""
        snapshot = self._of_page.get(page)
        if snapshot is not None and page in self._rolling and not self._readers[snapshot]:
            self._drop(page)

    def keep(self, page: int) -> None:
        """Keeps the snapshot of `page` from being freed as a rolling one. Called for the last
        snapshot of a lease that has ended."""
        self._rolling.discard(page)

    def load(self, place: Place, slot: int) -> bool:
        """Schedules a copy of a page's snapshot into the state of a slot with the next Plan.

        Returns:
            Whether the snapshot is copied from host memory.
        """
        page = place.number
        if place.on_host or page not in self._of_page:
            assert self.host is not None
            self.host.load(place, slot)
            return True
        snapshot = self._of_page[page]
        self._of_page.move_to_end(page)
        self._rolling.discard(page)
        self._readers[snapshot] += 1
        self._loads[slot] = _Load(page, snapshot)
        return False

    def cancel(self, slot: int) -> None:
        """Cancels the load into a slot that is freed, unless it is already part of a Plan."""
        load = self._loads.pop(slot, None)
        if load is not None:
            self._end_read(load.snapshot)
        elif self.host is not None:
            self.host.cancel(slot)

    def take_loads(self, seq: int) -> list[StateLoad]:
        """Returns the loads of Plan `seq`."""
        loads, self._loads = self._loads, {}
        for load in loads.values():
            self._fence.hold(load.snapshot, seq)
        return [StateLoad(slot, load.snapshot) for slot, load in loads.items()]

    def release(self, snapshots: Iterable[int], fence: int) -> None:
        """Frees pending snapshots once step `fence`, the last one that stores them,
        has completed."""
        self._pool.release(snapshots, fence)

    def forget(self, pages: Iterable[int]) -> None:
        """Frees the snapshots of evicted pages; no step in flight reads them."""
        for page in pages:
            if page in self._of_page:
                assert not self._readers[self._of_page[page]], "its page is not locked"
                self._drop(page)
            if self.host is not None:
                self.host.forget([Place(False, page)])

    def leave(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Moves the snapshots of pages to host memory along with the pages."""
        assert self.host is not None
        for page, slot in zip(pages, slots, strict=True):
            self.host.move(Place(False, page), Place(True, slot))
            if page in self._of_page:
                assert not self._readers[self._of_page[page]], "its page is not locked"
                self.host.store(self._of_page[page], Place(True, slot))
                self._drop(page)

    def check_invariants(self, pending: Iterable[int], cached: Collection[int]) -> None:
        """Asserts that `pending` are exactly the pending snapshots, that every other one is free or
        attached to a page in `cached`, and that the counts of loads are right."""
        self._pool.check_invariants([*self._of_page.values(), *pending])
        assert set(self._of_page) <= set(cached), "a snapshot of a page that is not cached"
        assert self._rolling <= set(self._of_page), "a page without a snapshot is marked as rolling"
        waiting = [load.snapshot for load in self._loads.values()]
        assert Counter([*waiting, *self._fence]) == +self._readers, "loads miscounted"
        assert all(load.page in self._of_page for load in self._loads.values()), "nothing to load"

    def _has(self, page: int) -> bool:
        in_host = self.host is not None and Place(False, page) in self.host
        return in_host or page in self._of_page

    def _drop(self, page: int) -> None:
        self._rolling.discard(page)
        self._pool.release([self._of_page.pop(page)], 0)

    def _end_read(self, snapshot: int) -> None:
        self._readers[snapshot] -= 1
        if not self._readers[snapshot]:
            del self._readers[snapshot]


class HostStatePages:
    """Host-memory tier of hybrid models: slots of pages, and the snapshots that move between
    tiers along with them.

    Args:
        slots: all slots in host memory.
        snapshots: snapshots on the device, and in host memory.
    """

    def __init__(self, slots: HostPool, snapshots: SnapshotPool) -> None:
        assert snapshots.host is not None
        self._slots = slots
        self._snapshots = snapshots
        self._host = snapshots.host
        self.num_missing = slots.num_missing
        self.num_fitting = slots.num_fitting
        self.num_kept = slots.num_kept
        self.is_idle = slots.is_idle

    def store(self, pages: Sequence[int]) -> list[int]:
        """Schedules copies of evicted pages and their snapshots; returns the slots."""
        slots = self._slots.store(pages)
        self._snapshots.leave(pages, slots)
        return slots

    def load(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Schedules copies of slots to device pages; their snapshots stay in host memory."""
        self._slots.load(slots, pages)
        self._follow(slots, pages)

    def forget(self, slots: Sequence[int]) -> None:
        """Releases slots that are evicted from the cache, and their snapshots."""
        self._slots.forget(slots)
        self._host.forget(Place(True, slot) for slot in slots)

    def supersede(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Releases `slots`, whose content was recomputed in the device pages `pages`."""
        self._slots.supersede(slots)
        self._follow(slots, pages)

    def _follow(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        for slot, page in zip(slots, pages, strict=True):
            self._host.move(Place(True, slot), Place(False, page))
