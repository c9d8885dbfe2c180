"""Which worker holds which block of tokens, exactly as the workers' events tell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from router.fleet.growing_table import GrowingTable, Keys
from router.fleet.worker_sets import WorkerSets
from worker.wire.blocks import BlockHashes
from worker.wire.messages import BlockEvent, BlockStored, Tier

Reach = tuple[int, int]
"""Slots as the bits of a number (see WorkerSets.reaches), and to how many leading blocks they
hold."""

_MANY = 192
"""Number of blocks from which on arrays are faster than single steps."""
_MANY_SLOTS = 1024
"""Sets of so many slots make single steps slower, by as much again each time."""
_FEW = 32
_ZERO = 2**64 - 1
"""Stands in for hash 0, which the table keeps for itself."""


class PrefixIndex:
    """Block hash → set of workers that hold the block, per tier.

    Hashes are chained, so one flat table suffices; caches evict from the leaves, so whoever holds a
    block holds all before it, and the end of a match is found by bisection.

    Each generation of a worker's cache has a slot of its own: to forget one is to take its bits
    out of every answer. Its blocks leave the table later, a part with each call of `apply`.
    """

    def __init__(self) -> None:
        self._sets = WorkerSets()
        self._table = GrowingTable(self._sets)
        self._slots: dict[str, int] = {}
        self._live = 0
        """Both bits of every slot in use."""
        self._held: list[list[int]] = []
        """Blocks that each tier holds, per slot."""
        self._free: list[int] = []

    def __len__(self) -> int:
        """Blocks in the table, those of forgotten workers that are still to leave it included."""
        return len(self._table)

    @property
    def num_bytes(self) -> int:
        """Memory of the table."""
        return self._table.num_bytes

    def slot(self, worker_id: str) -> int | None:
        """The worker's slot: bit 2·slot stands for its device, 2·slot + 1 for any tier."""
        return self._slots.get(worker_id)

    def num_blocks(self, worker_id: str, tier: Tier = "device") -> int:
        """Blocks that one worker holds in a tier."""
        slot = self._slots.get(worker_id)
        return 0 if slot is None else self._held[slot][tier == "host"]

    def replace(self, worker_id: str, stored: Iterable[BlockStored]) -> None:
        """Forgets what the worker held; `stored` is its whole cache now."""
        self.drop(worker_id)
        self.apply(worker_id, stored)

    def apply(self, worker_id: str, events: Iterable[BlockEvent]) -> None:
        """Takes blocks that entered or left the worker's cache, in order."""
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
        """Forgets a worker; costs nothing per block."""
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
        """The holders of leading blocks: falling sets, rising lengths, the last the longest.

        A slot's length is the last one whose set has its bit. O(log n) look-ups per set.
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
                # The bounds hold where caches evict leaves first; they keep a stray hash from
                # breaking the search.
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
        """Adds or removes one bit for each block; returns for how many that was news."""
        if len(hashes) >= max(_MANY // (1 + len(self._held) // _MANY_SLOTS), _FEW):
            keys: Keys = np.unique(np.array(hashes, np.uint64))
            if not keys[0]:
                keys = np.unique(np.where(keys == 0, np.uint64(_ZERO), keys))
            return self._table.change_many(keys, add, remove)
        change = self._table.change
        return sum(change(block_hash or _ZERO, add, remove) for block_hash in hashes)
