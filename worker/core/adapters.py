"""LoRA adapters of a worker group: their copies in host memory and slots on the device."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto

from msgspec.structs import replace

from worker.plan.plan import AdapterLoad, AdapterRead, AdapterReadResult
from worker.protocol.adapters import AdapterRef, AdapterTotals

_WEIGHT = 0.2
"""Weight of the latest read in the moving average of read times."""


class HostCopy(Enum):
    """State of an adapter's copy in host memory."""

    ABSENT = auto()
    READING = auto()
    PRESENT = auto()


class Adapter:
    """One version of an adapter that a request has used, with the state of its copies and the
    number of its requests."""

    __slots__ = ("fence", "host", "key", "num_users", "num_waiting", "ref", "slot", "used")

    def __init__(self, key: int, ref: AdapterRef) -> None:
        self.key = key
        """Key that identifies this version in Plans; never reused."""
        self.ref = ref
        self.host = HostCopy.ABSENT
        self.slot = 0
        """1-based slot on the device; 0 if it has none."""
        self.num_users = 0
        """Number of queued and running requests with this adapter. While there are any, the slot is
        locked."""
        self.num_waiting = 0
        """Number of requests waiting for a slot."""
        self.fence = 0
        """Number of the last Plan that loads the adapter into the slot, or that has a row of a
        request that has since released the adapter."""
        self.used = 0
        """Sequence number of the adapter's last use, which orders adapters for eviction."""


class AdapterPool:
    """Adapter copies and slots of a worker group, the same on all ranks, which follow the same
    Plans.

        absent ──read──> host memory ──load──> slot on the device
           ^                  │                      │
           └───── evicted ────┘ <───── evicted ──────┘

    A slot is locked while requests use its adapter and until the last step with one of their rows
    has completed. Of the unlocked slots, the least recently used one is evicted. The copy in host
    memory is kept for later loads. Copies in host memory are evicted in the same order, except
    those that waiting requests need.

    Args:
        num_slots: number of slots on the device; slots are 1-based.
        num_host_copies: maximum number of copies in host memory, at least `num_slots`.
    """

    def __init__(self, num_slots: int, num_host_copies: int) -> None:
        assert 1 <= num_slots <= num_host_copies
        self.totals = AdapterTotals()
        self._num_host_copies = num_host_copies
        self._by_version: dict[str, Adapter] = {}
        self._by_key: dict[int, Adapter] = {}
        """Adapters that have a copy, a slot or a request, by key."""
        self._slots: dict[int, Adapter | None] = dict.fromkeys(range(1, num_slots + 1))
        self._completed = 0
        self._num_uses = 0
        self._num_keys = 0
        self._reads: dict[int, AdapterRead] = {}
        self._drops: list[int] = []
        self._loads: dict[int, int] = {}
        """Slots to load in the next Plan, by adapter key."""

    def find(self, ref: AdapterRef) -> Adapter:
        """The adapter that a newly arrived request will wait for or use."""
        adapter = self._by_version.get(ref.version)
        if adapter is None:
            self._num_keys += 1
            adapter = Adapter(self._num_keys, ref)
            self._by_version[ref.version] = self._by_key[adapter.key] = adapter
        return adapter

    def of_key(self, key: int) -> Adapter | None:
        """The adapter whose key is `key`; None if it has been removed."""
        return self._by_key.get(key)

    def use(self, adapter: Adapter) -> None:
        """Locks the slot of an adapter for one more request."""
        assert adapter.slot, "the adapter is not on the device"
        adapter.num_users += 1
        self._touch(adapter)

    def release(self, adapter: Adapter, fence: int) -> None:
        """Ends a request's use of the adapter; `fence` is the last step with a row of the request,
        0 if there is none."""
        assert adapter.num_users > 0, "released more often than used"
        adapter.num_users -= 1
        adapter.fence = max(adapter.fence, fence)
        self._forget_if_unused(adapter)

    def forget_waiter(self, adapter: Adapter) -> None:
        """Records that a request no longer waits for the adapter."""
        assert adapter.num_waiting > 0
        adapter.num_waiting -= 1
        self._forget_if_unused(adapter)

    def read(self, adapter: Adapter) -> bool:
        """Starts reading an adapter into host memory, evicting a copy if there are too many.

        Returns:
            Whether the adapter is in host memory or being read; False if there is no room.
        """
        if adapter.host is not HostCopy.ABSENT:
            return True
        copies = [a for a in self._by_key.values() if a.host is not HostCopy.ABSENT]
        if len(copies) >= self._num_host_copies:
            idle = [a for a in copies if not self._is_copy_needed(a)]
            if not idle:
                return False
            self._drop_copy(min(idle, key=_last_use))
        self._touch(adapter)
        if adapter.key in self._drops:  # the ranks still have it
            self._drops.remove(adapter.key)
            adapter.host = HostCopy.PRESENT
        else:
            adapter.host = HostCopy.READING
            self._reads[adapter.key] = AdapterRead(
                adapter.key, adapter.ref.folder, adapter.ref.version
            )
        return True

    def take_slot(self, adapter: Adapter) -> bool:
        """Gives a slot to an adapter that is in host memory; the next Plan loads it.

        Returns:
            Whether the adapter has a slot; False if all are locked.
        """
        if adapter.slot:
            return True
        assert adapter.host is HostCopy.PRESENT, "there is nothing to load"
        slot = next((n for n, holder in self._slots.items() if holder is None), 0)
        if not slot:
            idle = [a for a in self.on_device() if self._is_idle(a)]
            if not idle:
                return False
            victim = min(idle, key=_last_use)
            slot = victim.slot
            self._vacate(victim)
        self._slots[slot] = adapter
        adapter.slot, adapter.fence = slot, 0
        self._loads[adapter.key] = slot
        self._touch(adapter)
        return True

    def on_device(self) -> Iterator[Adapter]:
        """Adapters with a slot."""
        return (holder for holder in self._slots.values() if holder is not None)

    def complete(self, seq: int) -> None:
        """Marks a step as completed."""
        self._completed = seq

    def read_ended(self, result: AdapterReadResult) -> None:
        """Records the end of a read. After an error, the caller has already ended the adapter's
        requests; later requests retry with a new key."""
        adapter = self._by_key.get(result.key)
        if result.error:
            self.totals.num_failures += 1
        else:
            totals = self.totals
            before = totals.read_s or result.seconds
            totals.read_s = before + _WEIGHT * (result.seconds - before)
            totals.num_reads += 1
            totals.read_time_s += result.seconds
        if adapter is None or adapter.host is not HostCopy.READING:
            return  # its copy was dropped in the meantime
        adapter.host = HostCopy.PRESENT
        if result.error:
            self._retire(adapter)
            self._drop_copy(adapter)

    def take(self, seq: int) -> tuple[list[AdapterRead], list[int], list[AdapterLoad]]:
        """Returns the reads, drops and loads decided since the previous Plan, to be sent with Plan
        `seq`."""
        reads, drops = list(self._reads.values()), self._drops
        loads = [AdapterLoad(slot, key) for key, slot in self._loads.items()]
        for key in self._loads:
            self._by_key[key].fence = seq
        self.totals.num_loads += len(loads)
        self._reads, self._drops, self._loads = {}, [], {}
        return reads, drops, loads

    def load(self, num_waiting: int) -> AdapterTotals:
        """Totals for a load report, with the adapters that are on the device and in host memory.

        Args:
            num_waiting: number of requests waiting for an adapter.
        """
        known = self._by_version.items()
        return replace(
            self.totals,
            num_waiting=num_waiting,
            on_device=[version for version, adapter in known if adapter.slot],
            on_host=[version for version, adapter in known if adapter.host is HostCopy.PRESENT],
        )

    def check_invariants(self) -> None:
        """Asserts that copies, slots and requests are consistent."""
        copies = [a for a in self._by_key.values() if a.host is not HostCopy.ABSENT]
        assert len(copies) <= self._num_host_copies, "too many copies in host memory"
        for slot, holder in self._slots.items():
            assert holder is None or (holder.slot == slot and self._by_key[holder.key] is holder)
        for adapter in self._by_key.values():
            assert not adapter.slot or self._slots[adapter.slot] is adapter
            assert adapter.slot or not adapter.num_users, "a request uses an adapter without a slot"
            assert adapter.key not in self._loads or self._loads[adapter.key] == adapter.slot
            assert not self._is_unused(adapter), "an adapter is kept without a reason"
        assert all(self._by_key[a.key] is a for a in self._by_version.values())

    def _is_idle(self, adapter: Adapter) -> bool:
        """Whether the adapter's slot can be given to another adapter."""
        return not adapter.num_users and adapter.fence <= self._completed

    def _is_copy_needed(self, adapter: Adapter) -> bool:
        """Whether requests are waiting for the adapter to be loaded from its copy in
        host memory."""
        return not adapter.slot and adapter.num_waiting > 0

    def _touch(self, adapter: Adapter) -> None:
        self._num_uses += 1
        adapter.used = self._num_uses

    def _vacate(self, adapter: Adapter) -> None:
        self._slots[adapter.slot] = None
        self._loads.pop(adapter.key, None)
        adapter.slot = 0
        self._forget_if_unused(adapter)

    def _drop_copy(self, adapter: Adapter) -> None:
        """Evicts a copy from host memory. An adapter that also has a slot keeps the slot."""
        if self._reads.pop(adapter.key, None) is None:
            self._drops.append(adapter.key)
            if adapter.host is HostCopy.READING:
                self._retire(adapter)
        adapter.host = HostCopy.ABSENT
        self._forget_if_unused(adapter)

    def _retire(self, adapter: Adapter) -> None:
        """Removes a version of an adapter, so that later requests for the adapter read it again,
        with a new key."""
        del self._by_version[adapter.ref.version]

    def _is_unused(self, adapter: Adapter) -> bool:
        has_copy = adapter.slot or adapter.host is not HostCopy.ABSENT
        return not (has_copy or adapter.num_users or adapter.num_waiting)

    def _forget_if_unused(self, adapter: Adapter) -> None:
        if not self._is_unused(adapter) or self._by_key.pop(adapter.key, None) is None:
            return
        if self._by_version.get(adapter.ref.version) is adapter:
            del self._by_version[adapter.ref.version]


def _last_use(adapter: Adapter) -> int:
    return adapter.used
