"""PrefixIndex: which workers have which blocks in their prefix caches, from their block events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from router.fleet.growing_table import GrowingTable, Keys
from router.fleet.worker_sets import WorkerSets
from worker.protocol.blocks import BlockHashes
from worker.protocol.messages import BlockEvent, BlockStored, Tier

Reach = tuple[int, int]
"""A set of slots (bits as in WorkerSets.reaches) and the number of leading blocks they have."""

_MANY = 1024
"""Minimum number of blocks in an event for which numpy is faster than a loop over the blocks."""
_ZERO = 2**64 - 1
"""Replaces hash 0, which marks free cells of the table."""


class PrefixIndex:
    """Maps block hashes to the sets of workers that have the block, per tier.

    Hashes are chained, so a flat table represents a tree; caches evict leaves first, so a worker
    that has a block has all blocks before it, and the end of a hit is found by bisection.

    A slot is one generation of a worker's cache. Dropping a worker masks its slot in all results;
    its blocks are removed from the table later, a few per call of `apply`.
    """

    def __init__(self) -> None:
        self._sets = WorkerSets()
        self._table = GrowingTable(self._sets)
        self._slots: dict[str, int] = {}
        """Current slot by worker id."""
        self._live = 0
        """Bit mask of the current slots, two bits each."""
        self._held: list[list[int]] = []
        """Number of blocks on the device and in host memory, by slot."""
        self._free: list[int] = []
        """Unused slots: no block in the table refers to them."""

    def __len__(self) -> int:
        """Number of blocks in the table, including blocks of dropped workers that are not removed
        yet."""
        return len(self._table)

    @property
    def num_bytes(self) -> int:
        """Size of the table in bytes."""
        return self._table.num_bytes

    def slot(self, worker_id: str) -> int | None:
        """The worker's slot; None for an unknown worker.

        In a Reach, bit 2·slot stands for the device, bit 2·slot + 1 for any tier.
        """
        return self._slots.get(worker_id)

    def num_blocks(self, worker_id: str, tier: Tier = "device") -> int:
        """Number of blocks that a worker has in a tier."""
        slot = self._slots.get(worker_id)
        return 0 if slot is None else self._held[slot][tier == "host"]

    def replace(self, worker_id: str, stored: Iterable[BlockStored]) -> None:
        """Replaces all blocks of a worker with `stored`."""
        self.drop(worker_id)
        self.apply(worker_id, stored)

    def apply(self, worker_id: str, events: Iterable[BlockEvent]) -> None:
        """Applies events of blocks stored in or removed from a worker's cache, in their order."""
        slot = self._slots.get(worker_id)
        if slot is None:
            slot = self._new_slot(worker_id)
        for event in events:
            tier = int(event.tier == "host")
            bit = 1 << (2 * slot + tier)
            added = isinstance(event, BlockStored)
            moved = self._change(event.block_hashes, bit if added else 0, 0 if added else bit)
            self._held[slot][tier] += moved if added else -moved
        self._free += self._table.work()

    def drop(self, worker_id: str) -> None:
        """Drops all blocks of a worker, in O(1)."""
        slot = self._slots.pop(worker_id, None)
        if slot is None:
            return
        bits = 0b11 << 2 * slot
        self._live &= ~bits
        if any(self._held[slot]):
            self._table.sweep_later(slot, sum(self._held[slot]))
        else:
            self._free.append(slot)

    def match(self, hashes: BlockHashes) -> list[Reach]:
        """Hits of a prompt: sets of slots, each with the number of leading blocks that they have.

        Sets shrink and lengths grow; the hit of a slot is the last entry whose set contains it.
        O(log n) lookups per entry.
        """
        count = len(hashes)
        if not count:
            return []
        get, reaches, live = self._table.reader(), self._sets.reaches, self._live
        item = hashes.item
        first = reaches[get(item(0) or _ZERO)] & live
        if not first:
            return []
        last = reaches[get(item(count - 1) or _ZERO)] & first
        found: list[Reach] = []
        spans = [(0, first, count - 1, last)]
        while spans:
            low, holders, high, fewer = spans.pop()
            while high - low > 1 and holders != fewer:
                middle = (low + high) // 2
                # If caches evict leaves first, `& holders | fewer` changes nothing; a block without
                # the ones before it must not break the search.
                between = reaches[get(item(middle) or _ZERO)] & holders | fewer
                if between == holders:
                    low = middle
                    continue
                if between != fewer:
                    spans.append((middle, between, high, fewer))
                high, fewer = middle, between
            if holders != fewer:
                found.append((holders, high))
        if last:
            found.append((last, count))
        return found

    def _new_slot(self, worker_id: str) -> int:
        if self._free:
            slot = self._free.pop()
            self._held[slot] = [0, 0]
        else:
            slot = len(self._held)
            self._held.append([0, 0])
            self._sets.add_slot(slot)
        self._slots[worker_id] = slot
        self._live |= 0b11 << 2 * slot
        return slot

    def _change(self, hashes: Sequence[int], add: int, remove: int) -> int:
        """Adds or removes a bit in the sets of blocks; returns the number of sets that changed."""
        if len(hashes) < _MANY:
            keys = hashes if all(hashes) else [block_hash or _ZERO for block_hash in hashes]
            return self._table.change_few(keys, add, remove)
        many: Keys = np.array(hashes, np.uint64)
        many[many == 0] = _ZERO
        many.sort()
        # Not np.unique, which takes ten times as long: it hashes integers.
        return self._table.change_many(many[np.append(True, many[1:] != many[:-1])], add, remove)
