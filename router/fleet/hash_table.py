"""A table from 64-bit block hashes to small numbers: 12 bytes per cell, in two flat arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Values = NDArray[np.uint32]
Cells = NDArray[np.int64]


class HashTable:
    """Open addressing with linear probing, of fixed capacity.

    Single keys go through memory views, which plain Python reads several times faster than
    arrays; many keys at once go through numpy. Key 0 marks a free cell. A cell once taken keeps its
    key, so that probes pass over it; value 0 says that nothing is stored under it.

    Args:
        capacity: number of cells, a power of two.
    """

    __slots__ = ("_key_view", "_mask", "_value_view", "capacity", "keys", "used", "values")

    def __init__(self, capacity: int) -> None:
        assert capacity & (capacity - 1) == 0, "capacity must be a power of two"
        self.capacity = capacity
        self.keys: Keys = np.zeros(capacity, np.uint64)
        self.values: Values = np.zeros(capacity, np.uint32)
        self.used = 0
        """Cells that hold a key."""
        self._key_view = self.keys.data
        self._value_view = self.values.data
        self._mask = capacity - 1

    def get(self, key: int) -> int:
        """The value under `key`, 0 if there is none."""
        keys, mask = self._key_view, self._mask
        cell = key & mask
        while True:
            found = keys[cell]
            if found == key:
                return self._value_view[cell]
            if not found:
                return 0
            cell = (cell + 1) & mask

    def claim(self, key: int) -> int:
        """The cell of `key`, which from now on has one."""
        keys, mask = self._key_view, self._mask
        cell = key & mask
        while True:
            found = keys[cell]
            if found == key:
                return cell
            if not found:
                keys[cell] = key
                self.used += 1
                return cell
            cell = (cell + 1) & mask

    def take(self, key: int) -> int:
        """The value under `key`, which is then 0."""
        keys, mask = self._key_view, self._mask
        cell = key & mask
        while True:
            found = keys[cell]
            if found == key:
                value = self._value_view[cell]
                self._value_view[cell] = 0
                return value
            if not found:
                return 0
            cell = (cell + 1) & mask

    def put(self, cell: int, value: int) -> None:
        """Sets the value in a cell."""
        self._value_view[cell] = value

    def find_many(self, keys: Keys) -> Cells:
        """The cell of each key, -1 for those that have none."""
        mask = np.uint64(self._mask)
        cells = (keys & mask).astype(np.int64)
        result = np.full(len(keys), -1, np.int64)
        active = np.arange(len(keys))
        while len(active):
            here = cells[active]
            found = self.keys[here]
            hit = found == keys[active]
            result[active[hit]] = here[hit]
            active = active[~hit & (found != 0)]
            cells[active] = (cells[active] + 1) & self._mask
        return result

    def claim_many(self, keys: Keys) -> Cells:
        """The cell of each key; no key may occur twice."""
        mask = np.uint64(self._mask)
        cells = (keys & mask).astype(np.int64)
        result = np.empty(len(keys), np.int64)
        active = np.arange(len(keys))
        while len(active):
            here, wanted = cells[active], keys[active]
            free = self.keys[here] == 0
            # Of several keys that want one free cell the last is written; the others move on.
            self.keys[here[free]] = wanted[free]
            won = self.keys[here] == wanted
            self.used += int(np.count_nonzero(won & free))
            result[active[won]] = here[won]
            active = active[~won]
            cells[active] = (cells[active] + 1) & self._mask
        return result
