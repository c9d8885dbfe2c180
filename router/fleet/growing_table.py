"""GrowingTable: the prefix index's hash table, which is resized and cleaned incrementally."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from router.fleet.hash_table import HashTable, Keys, Values
from router.fleet.worker_sets import WorkerSets

__all__ = ["GrowingTable", "Keys"]

_MIN_CAPACITY = 1024
_PART = 2048
"""Minimum number of cells moved per call of `work`."""
_MAX_DEAD = 32
"""Maximum number of dead slots before a sweep in small fleets: dead slots lengthen the bit sets."""
_DEAD_PART = 8
"""Inverse of the fraction of dead slots above which they are swept in large fleets."""
_CELLS_PER_KEY = 6
"""Cells moved per new key, so that the old table is empty before the new one is full."""


class GrowingTable:
    """Maps block hashes to sets of workers, each represented by its number in WorkerSets.

    A full table is replaced by a new one of the right size, into which the old one is moved
    incrementally. Until then a key may be in both tables, but has a value in only one of them.
    Values that are moved lose the bits of dead slots (slots that the index has dropped).

    Args:
        sets: the sets that the numbers refer to; counts the blocks of each.
    """

    def __init__(self, sets: WorkerSets) -> None:
        self._sets = sets
        self._table = HashTable(_MIN_CAPACITY)
        self._old: HashTable | None = None
        self._num_emptied = 0
        """Leading cells of the old table that have been moved."""
        self._size = 0
        """Number of keys with a value."""
        self._owed = 0
        """Cells to move for keys added since the last call of `work`."""
        self._dead: list[int] = []
        """Slots dropped since the start of the current move."""
        self._dying: list[int] = []
        """Slots dropped before the current move; once the old table has been moved, no value has
        their bits."""
        self._dying_bits = 0
        """Bits of the `_dying` slots."""
        self._num_stale = 0
        """Number of blocks that the `_dead` slots had."""

    def __len__(self) -> int:
        return self._size

    @property
    def num_bytes(self) -> int:
        """Size of all cells in bytes, including those of the old table."""
        tables = [self._table] if self._old is None else [self._table, self._old]
        return sum(table.keys.nbytes + table.values.nbytes for table in tables)

    def get(self, key: int) -> int:
        """The set number of a key; 0 if it has none."""
        value = self._table.get(key)
        if not value and self._old is not None:
            return self._old.get(key)
        return value

    def reader(self) -> Callable[[int], int]:
        """A function that works like `get` and is as fast as possible; valid until the table
        changes."""
        return self._table.get if self._old is None else self.get

    def change_few(self, keys: Sequence[int], add: int, remove: int) -> int:
        """Like `change_many`, for a few keys given as integers, which may repeat.

        The blocks of one event usually have the same set, so the changed set is computed only once.
        """
        if add:
            self._make_room(len(keys))
        if self._old is not None:
            self._pull_few(keys)
        table, sets = self._table, self._sets
        values = table.value_view
        before = after = -1
        count = num_moved = 0
        for cell in table.claim_each(keys) if add else table.find_each(keys):
            value = values[cell]
            if value != before:
                if count:
                    self._count_moved(before, after, count)
                    num_moved += count
                    count = 0
                before, mask = value, sets.masks[value]
                changed = (mask | add) & ~remove
                after = value if changed == mask else sets.number(changed)
            if after != before:
                values[cell] = after
                count += 1
        if count:
            self._count_moved(before, after, count)
        return num_moved + count

    def change_many(self, keys: Keys, add: int, remove: int) -> int:
        """Adds bits to and removes bits from the sets of distinct blocks; returns the number of
        sets that changed."""
        self._make_room(len(keys))
        if self._old is not None:
            self._pull(keys)
        if add:
            cells = self._table.claim_many(keys)
        else:
            cells = self._table.find_many(keys)
            cells = cells[cells >= 0]
            cells = cells[self._table.values[cells] != 0]
        before = self._table.values[cells]
        after, num_moved = self._sets.move_many(before, add, remove)
        self._table.values[cells] = after
        self._size += int(np.count_nonzero(after)) - int(np.count_nonzero(before))
        return num_moved

    def sweep_later(self, slot: int, num_blocks: int) -> None:
        """Records that a slot with `num_blocks` blocks was dropped. Readers must mask its bits
        until it has been swept."""
        self._dead.append(slot)
        self._num_stale += num_blocks
        if self._old is None:
            self._sweep_if_due()

    def work(self) -> list[int]:
        """Moves a part of the old table; returns dropped slots that can be reused."""
        if self._old is None:
            return []
        self._move_cells(max(_PART, self._owed))
        self._owed = 0
        if self._num_emptied < self._old.capacity:
            return []
        self._old = None
        freed, self._dying, self._dying_bits = self._dying, [], 0
        self._sweep_if_due()
        return freed

    def _sweep_if_due(self) -> None:
        max_dead = max(_MAX_DEAD, self._sets.num_slots // _DEAD_PART)
        if self._num_stale > self._size // 2 or len(self._dead) > max_dead:
            self._start_moving(0)

    def _make_room(self, count: int) -> None:
        self._owed += _CELLS_PER_KEY * count
        if 3 * (self._table.used + count) <= 2 * self._table.capacity:
            return
        if self._old is not None:  # many keys were added at once: the last move is not finished
            self._move_cells(self._old.capacity)
            if 3 * (self._table.used + count) <= 2 * self._table.capacity:
                return
        self._start_moving(count)

    def _start_moving(self, num_new: int) -> None:
        capacity = _MIN_CAPACITY
        while 5 * capacity < 11 * (self._size + num_new):
            capacity *= 2
        self._old, self._table = self._table, HashTable(capacity)
        self._num_emptied = self._owed = 0
        self._dying += self._dead
        self._dead = []
        self._num_stale = 0
        self._dying_bits = sum(0b11 << 2 * slot for slot in self._dying)

    def _count_moved(self, before: int, after: int, count: int) -> None:
        self._sets.count_moved(before, after, count)
        if not before:
            self._size += count
        elif not after:
            self._size -= count

    def _move_cells(self, count: int) -> None:
        assert self._old is not None
        start = self._num_emptied
        end = min(start + count, self._old.capacity)
        values = self._old.values[start:end]
        full = np.flatnonzero(values)
        self._move(self._old.keys[start:end][full], values[full])
        self._old.values[start:end] = 0
        self._num_emptied = end

    def _pull(self, keys: Keys) -> None:
        """Moves the given keys from the old table to the new one immediately."""
        assert self._old is not None
        cells = self._old.find_many(keys)
        there = np.flatnonzero(cells >= 0)
        there = there[self._old.values[cells[there]] != 0]
        cells = cells[there]
        values = self._old.values[cells]
        self._old.values[cells] = 0
        self._move(keys[there], values)

    def _pull_few(self, keys: Iterable[int]) -> None:
        """Like `_pull`, for a few keys given as integers."""
        assert self._old is not None
        for key in keys:
            if value := self._old.take(key):
                number = self._sets.move(value, self._sets.masks[value] & ~self._dying_bits)
                self._table.put(self._table.claim(key), number)
                self._size -= not number

    def _move(self, keys: Keys, values: Values) -> None:
        """Inserts keys of the old table into the new one, without the bits of dying slots."""
        if not len(keys):
            return
        if self._dying_bits:
            values, _ = self._sets.move_many(values, 0, self._dying_bits)
            kept = np.flatnonzero(values)
            self._size -= len(values) - len(kept)
            keys, values = keys[kept], values[kept]
        self._table.values[self._table.claim_many(keys)] = values
