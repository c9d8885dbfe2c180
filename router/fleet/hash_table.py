"""HashTable: maps 64-bit block hashes to 32-bit numbers; 12 bytes per cell in two numpy arrays."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Values = NDArray[np.uint32]
Cells = NDArray[np.int64]


class HashTable:
    """Hash table of fixed capacity: open addressing with linear probing.

    Methods for a single key use memory views, whose items Python reads several times faster than
    those of arrays; methods for many keys use numpy. Key 0 marks a free cell. A cell never loses
    its key, so that probes for other keys pass over it; value 0 means that the key has no value.

    Args:
        capacity: number of cells, a power of two.
    """

    __slots__ = ("_key_view", "_mask", "capacity", "keys", "used", "value_view", "values")

    def __init__(self, capacity: int) -> None:
        assert capacity & (capacity - 1) == 0, "capacity must be a power of two"
        self.capacity = capacity
        self.keys: Keys = np.zeros(capacity, np.uint64)
        self.values: Values = np.zeros(capacity, np.uint32)
        self.used = 0
        """Number of cells with a key."""
        self.value_view = self.values.data
        """Memory view of `values`."""
        self._key_view = self.keys.data
        self._mask = capacity - 1

    def get(self, key: int) -> int:
        """The value of `key`; 0 if it has none."""
        keys, mask = self._key_view, self._mask
        cell = key & mask
        while True:
            found = keys[cell]
            if found == key:
                return self.value_view[cell]
            if not found:
                return 0
            cell = (cell + 1) & mask

    def claim(self, key: int) -> int:
        """Index of the cell of `key`. If it has no cell, assigns one."""
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

    def find_each(self, keys: Iterable[int]) -> list[int]:
        """Indices of the keys' cells; keys without a cell are omitted."""
        view, mask = self._key_view, self._mask
        cells: list[int] = []
        for key in keys:
            cell = key & mask
            while (found := view[cell]) != key and found:
                cell = (cell + 1) & mask
            if found:
                cells.append(cell)
        return cells

    def claim_each(self, keys: Iterable[int]) -> list[int]:
        """Index of each key's cell. Keys without a cell are assigned one."""
        view, mask = self._key_view, self._mask
        num_new = 0
        cells: list[int] = []
        for key in keys:
            cell = key & mask
            while (found := view[cell]) != key:
                if not found:
                    view[cell] = key
                    num_new += 1
                    break
                cell = (cell + 1) & mask
            cells.append(cell)
        self.used += num_new
        return cells

    def take(self, key: int) -> int:
        """Removes the value of `key` and returns it; 0 if it has none."""
        keys, mask = self._key_view, self._mask
        cell = key & mask
        while True:
            found = keys[cell]
            if found == key:
                value = self.value_view[cell]
                self.value_view[cell] = 0
                return value
            if not found:
                return 0
            cell = (cell + 1) & mask

    def put(self, cell: int, value: int) -> None:
        """Sets the value of a cell."""
        self.value_view[cell] = value

    def find_many(self, keys: Keys) -> Cells:
        """Index of each key's cell, or -1 if the key has none; uses numpy."""
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
        """Like `claim_each`, for many distinct keys, with numpy."""
        mask = np.uint64(self._mask)
        cells = (keys & mask).astype(np.int64)
        result = np.empty(len(keys), np.int64)
        active = np.arange(len(keys))
        while len(active):
            here, searched = cells[active], keys[active]
            free = self.keys[here] == 0
            # If several keys want the same free cell, the last is written; the others move on.
            self.keys[here[free]] = searched[free]
            won = self.keys[here] == searched
            self.used += int(np.count_nonzero(won & free))
            result[active[won]] = here[won]
            active = active[~won]
            cells[active] = (cells[active] + 1) & self._mask
        return result
