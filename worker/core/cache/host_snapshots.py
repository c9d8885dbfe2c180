"""Host-memory tier of linear-attention states: snapshots, and copies between them and the
device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import NamedTuple

from worker.core.cache.fence import CompletedSteps
from worker.core.cache.pool import FencedPool
from worker.plan.plan import PageCopies


class Place(NamedTuple):
    """Location of a cached page."""

    on_host: bool
    number: int
    """Number of the page, or of its slot in host memory."""


class HostSnapshots:
    """Snapshots in host memory, each attached to a cached page, which is on the device or in host
    memory.

        snapshot on the device ──store──> snapshot in host memory ──load──> state of a request

    Unlike a page, a snapshot stays in host memory after a load, until its page is evicted from both
    tiers or it is itself evicted as the least recently used one.

    Copies are part of the next Plan, in the order stores, loads.

    HAZARD(fence): a host snapshot is only reused after the last step with a copy from or to it, and
    that step's loads, have completed. States of requests need no fence: no step in flight uses the
    slot of a new request, which keeps it until the load has ended.

    Args:
        count: number of snapshots.
        copied: the steps that have completed with all loads of their Plans.
    """

    def __init__(self, count: int, copied: CompletedSteps) -> None:
        self._pool = FencedPool(0, count, copied)
        self._at: dict[Place, int] = {}
        """Snapshots by the location of their page."""
        self._places: OrderedDict[int, Place] = OrderedDict()
        """Locations of pages by snapshot, least recently used first."""
        self._touched = [0] * count
        """Last step that copies from or to each snapshot."""
        self._next_seq = 1
        """Number of the next Plan, which includes the copies."""
        self._stores = PageCopies([], [])
        self._loads: dict[int, int] = {}
        """Snapshots to load with the next Plan, by slot of the request."""

    @property
    def num_to_load(self) -> int:
        """Number of snapshots that the next Plan loads."""
        return len(self._loads)

    def __contains__(self, place: Place) -> bool:
        return place in self._at

    def store(self, snapshot: int, place: Place) -> None:
        """Schedules a copy of a device snapshot to host memory with the next Plan, for the page at
        `place`. Does nothing if that page already has a snapshot in host memory, or if no host
        snapshot can be reused yet."""
        if place in self._at:
            return
        host_snapshot = self._take()
        if host_snapshot is None:
            return
        self._at[place] = host_snapshot
        self._places[host_snapshot] = place
        self._touched[host_snapshot] = self._next_seq
        self._stores.pages.append(snapshot)
        self._stores.slots.append(host_snapshot)

    def load(self, place: Place, slot: int) -> None:
        """Schedules a copy of a page's snapshot into the state of a slot with the next Plan."""
        host_snapshot = self._at[place]
        self._places.move_to_end(host_snapshot)
        self._touched[host_snapshot] = self._next_seq
        self._loads[slot] = host_snapshot

    def cancel(self, slot: int) -> None:
        """Cancels the load into a slot that is freed, unless it is already part of a Plan."""
        self._loads.pop(slot, None)

    def move(self, before: Place, after: Place) -> None:
        """Attaches a page's snapshot, if it has one, to the page's new location."""
        host_snapshot = self._at.pop(before, None)
        if host_snapshot is not None:
            assert after not in self._at
            self._at[after] = host_snapshot
            self._places[host_snapshot] = after

    def forget(self, places: Iterable[Place]) -> None:
        """Frees the snapshots of evicted pages."""
        for place in places:
            if place in self._at:
                self._drop(place)

    def take_copies(self, seq: int) -> tuple[PageCopies | None, PageCopies | None]:
        """Returns the stores and loads of Plan `seq`, in the format of `Plan`; None if there are
        none. Must be called for every Plan."""
        assert seq == self._next_seq, f"Plan {seq} takes the copies of Plan {self._next_seq}"
        self._next_seq += 1
        stores, self._stores = self._stores, PageCopies([], [])
        loads, self._loads = self._loads, {}
        return (
            stores if stores.pages else None,
            PageCopies([*loads], [*loads.values()]) if loads else None,
        )

    def check_invariants(self, cached: Collection[Place]) -> None:
        """Asserts that each snapshot is free, fenced or attached to a page in `cached`."""
        self._pool.check_invariants(self._places)
        assert {place: number for number, place in self._places.items()} == self._at
        assert set(self._at) <= set(cached), "a host snapshot of a page that is not cached"
        assert len(set(self._stores.slots)) == len(self._stores.slots), "stored twice"

    def _take(self) -> int | None:
        if not self._pool.num_free:
            oldest = next(iter(self._places), None)
            if oldest is None or not self._pool.passed(self._touched[oldest]):
                return None
            self._drop(self._places[oldest])
        return self._pool.take(1)[0]

    def _drop(self, place: Place) -> None:
        host_snapshot = self._at.pop(place)
        del self._places[host_snapshot]
        self._pool.release([host_snapshot], self._touched[host_snapshot])
