"""Host-memory tier of models with sliding windows: blocks of host slots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from worker.core.cache.blocks import BlockPool
from worker.core.cache.host import HostPool


class HostBlocks:
    """Blocks in host memory. Each has slots for the pages that a block of the BlockPool had when it
    was evicted: all full-attention pages, and the window pages if they had not been freed.

    Evictions start at the ends of cached prefixes, so a conversation moves to the host along with
    the window pages at its end, and can be continued from there. Blocks are numbered; numbers are
    never reused.

    A block without any pages (all layers have windows, and it is behind them) occupies an empty
    slot, which bounds the number of blocks.

    Args:
        slots: all slots in host memory.
        blocks: blocks on the device.
    """

    def __init__(self, slots: HostPool, blocks: BlockPool) -> None:
        self._slots = slots
        self._blocks = blocks
        self._next = 1
        self._full: dict[int, list[int]] = {}
        """Slots of pages in full-attention groups, by block."""
        self._window: dict[int, list[int]] = {}
        """Slots of pages in window groups, by block (only blocks that have them)."""
        self._empty: dict[int, int] = {}
        """Empty slots, by block (only blocks without pages)."""

    def num_missing(self, blocks: Sequence[int]) -> int:
        """Number of slots to free before all `blocks` can be stored; 0 or less if they fit."""
        return sum(map(self._num_to_store, blocks)) - self._slots.num_free

    def num_fitting(self, blocks: Sequence[int]) -> int:
        """Number of leading blocks that can be stored now."""
        num_free = self._slots.num_free
        for index, block in enumerate(blocks):
            num_free -= self._num_to_store(block)
            if num_free < 0:
                return index
        return len(blocks)

    def num_kept(self, host_blocks: Sequence[int], count: int) -> int:
        """Number of leading blocks that can stay if blocks at the end are freed until at least
        `count` slots are free; 0 if none can."""
        keep = len(host_blocks)
        while keep and count > 0:
            keep -= 1
            count -= len(self._slots_of(host_blocks[keep]))
        return keep

    def is_idle(self, host_blocks: Iterable[int]) -> bool:
        """Whether no copy in flight uses any of `host_blocks`."""
        return all(self._slots.is_idle(self._slots_of(block)) for block in host_blocks)

    def has_window(self, host_block: int) -> bool:
        """Whether a block has window pages."""
        return host_block in self._window

    def num_loaded(self, host_blocks: Sequence[int], num_seen: int) -> int:
        """Number of pages to load for a request that needs the window pages of the last `num_seen`
        blocks."""
        groups = self._blocks.groups
        return groups.num_full * len(host_blocks) + groups.num_window * num_seen

    def store(self, blocks: Sequence[int]) -> list[int]:
        """Schedules copies of evicted blocks with the next Plan; returns their host blocks.

        The caller must check that enough slots are free.
        """
        host_blocks = list(range(self._next, self._next + len(blocks)))
        self._next += len(blocks)
        for host_block, block in zip(host_blocks, blocks, strict=True):
            full, window = self._blocks.pages(block)
            self._full[host_block] = self._slots.store(full)
            if window:
                self._window[host_block] = self._slots.store(window)
            elif not full:
                self._empty[host_block] = self._slots.reserve()
        return host_blocks

    def load(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        """Schedules copies to blocks on the device with the next Plan, after which the host blocks
        are free. Window pages are loaded for blocks that have them on the device."""
        for host_block, block in zip(host_blocks, blocks, strict=True):
            full, window = self._blocks.pages(block)
            self._slots.load(self._full.pop(host_block), full)
            slots = self._window.pop(host_block, [])
            if window:
                assert slots, "no window pages in host memory"
                self._slots.load(slots, window)
            else:
                self._slots.forget(slots)
            self._slots.forget(self._pop_empty(host_block))

    def forget(self, host_blocks: Sequence[int]) -> None:
        """Releases blocks that are evicted from the cache."""
        for host_block in host_blocks:
            self._slots.forget(self._pop(host_block))

    def supersede(self, host_blocks: Sequence[int], _blocks: Sequence[int]) -> None:
        """Releases blocks that were recomputed on the device."""
        for host_block in host_blocks:
            self._slots.supersede(self._pop(host_block))

    def slots(self, host_blocks: Iterable[int]) -> list[int]:
        """Slots that belong to `host_blocks`."""
        return [slot for block in host_blocks for slot in self._slots_of(block)]

    def check_invariants(self, host_blocks: Iterable[int]) -> None:
        """Asserts that `host_blocks` are exactly the blocks in host memory."""
        assert set(host_blocks) == set(self._full), "a host block without an owner"
        assert set(self._window) <= set(self._full)

    def _num_to_store(self, block: int) -> int:
        full, window = self._blocks.pages(block)
        return len(full) + len(window) or 1

    def _slots_of(self, host_block: int) -> list[int]:
        slots = self._full[host_block] + self._window.get(host_block, [])
        return slots or [self._empty[host_block]]

    def _pop(self, host_block: int) -> list[int]:
        slots = self._full.pop(host_block) + self._window.pop(host_block, [])
        return slots + self._pop_empty(host_block)

    def _pop_empty(self, host_block: int) -> list[int]:
        slot = self._empty.pop(host_block, None)
        return [] if slot is None else [slot]
