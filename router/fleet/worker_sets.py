"""WorkerSets: numbers the distinct sets of worker caches that have a block."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class WorkerSets:
    """Interned bit sets of slots: each distinct set that belongs to some block has a number.

    A slot is one generation of a worker's cache. It has two bits in a set, one per tier: bit 2·slot
    for the device, bit 2·slot + 1 for host memory. Number 0 is the empty set.
    """

    def __init__(self) -> None:
        self.masks: list[int] = [0]
        """Bits of each set, by its number."""
        self.reaches: list[int] = [0]
        """Bits of each set, by its number, with bit 2·slot for the device and 2·slot + 1 for any
        tier. Along a prompt, both bits only change from set to clear, regardless of the tier of
        each part of the prefix."""
        self._ids: dict[int, int] = {0: 0}
        """Number of each set, by its bits."""
        self._counts: list[int] = [0]
        """Number of blocks that belong to exactly this set, by its number."""
        self._free: list[int] = []
        """Unused numbers."""
        self._device_bits = 0
        """Mask of the device bits (2·slot) of all slots."""
        self.num_slots = 0
        """Number of slots added."""

    def add_slot(self, slot: int) -> None:
        """Adds a slot. Must be called before a block is added to it."""
        self._device_bits |= 1 << 2 * slot
        self.num_slots += 1

    def move(self, before: int, mask: int, count: int = 1) -> int:
        """Moves `count` blocks from set number `before` to the set with bits `mask`; returns the
        number of that set."""
        after = self.number(mask)
        self.count_moved(before, after, count)
        return after

    def number(self, mask: int) -> int:
        """Number of the set with bits `mask`. If the set is new, a block must be added to it before
        the next call."""
        number = self._ids.get(mask)
        return self._new(mask) if number is None else number

    def count_moved(self, before: int, after: int, count: int) -> None:
        """Records that `count` blocks moved from set number `before` to `after`."""
        self._counts[after] += count
        self._counts[before] -= count
        if before and not self._counts[before]:
            del self._ids[self.masks[before]]
            self._free.append(before)

    def move_many(
        self, before: NDArray[np.uint32], add: int, remove: int
    ) -> tuple[NDArray[np.uint32], int]:
        """Adds bits to the sets of many blocks, and removes others.

        Args:
            before: set number of each block.
            add: bits to add.
            remove: bits to remove.

        Returns:
            The new set number of each block, and the number of blocks that have changed.
        """
        numbers, inverse, counts = np.unique(before, return_inverse=True, return_counts=True)
        after = np.empty(len(numbers), np.uint32)
        num_moved = 0
        for place, (number, count) in enumerate(
            zip(numbers.tolist(), counts.tolist(), strict=True)
        ):
            mask = (self.masks[number] | add) & ~remove
            if mask == self.masks[number]:
                after[place] = number
                continue
            after[place] = self.move(number, mask, count)
            num_moved += count
        return after[inverse], num_moved

    def _new(self, mask: int) -> int:
        device = mask & self._device_bits
        reach = device | (device << 1) | (mask & ~self._device_bits)
        if self._free:
            number = self._free.pop()
            self.masks[number], self.reaches[number] = mask, reach
        else:
            number = len(self.masks)
            self.masks.append(mask)
            self.reaches.append(reach)
            self._counts.append(0)
        self._ids[mask] = number
        return number
