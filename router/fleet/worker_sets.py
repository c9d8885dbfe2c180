"""Sets of cache slots, each with a small number, as long as some block is held by exactly it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class WorkerSets:
    """Numbers for sets; a set is the bits of an integer. Number 0 is the empty set.

    A slot is one generation of a worker's cache. It has two bits, one per tier: 2·slot for blocks
    on the device, 2·slot + 1 for blocks in host memory.
    """

    def __init__(self) -> None:
        self.masks: list[int] = [0]
        self.reaches: list[int] = [0]
        """Masks per set: bit 2·slot where the device holds the block and 2·slot + 1 where any tier
        does: along a chain both only ever go from held to not held, whatever tiers hold the
        parts."""
        self._ids: dict[int, int] = {0: 0}
        self._counts: list[int] = [0]
        self._free: list[int] = []
        self._device_bits = 0
        self.num_slots = 0
        """Slots that were made known."""

    def __len__(self) -> int:
        return len(self._ids) - 1

    def add_slot(self, slot: int) -> None:
        """Makes the bits of a slot known; before any block of it is."""
        self._device_bits |= 1 << 2 * slot
        self.num_slots += 1

    def move(self, before: int, mask: int, count: int = 1) -> int:
        """`count` blocks go from set number `before` to the set `mask`; returns its number."""
        after = self._ids.get(mask)
        if after is None:
            after = self._new(mask)
        self._counts[after] += count
        self._counts[before] -= count
        if before and not self._counts[before]:
            del self._ids[self.masks[before]]
            self._free.append(before)
        return after

    def move_many(
        self, before: NDArray[np.uint32], add: int, remove: int
    ) -> tuple[NDArray[np.uint32], int]:
        """Adds and removes bits in the sets of many blocks.

        Returns the new numbers, and how many blocks are in another set than before.
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
