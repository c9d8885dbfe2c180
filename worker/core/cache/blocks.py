"""Block pool for models with sliding windows: a block has a page in each group of layers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from worker.core.cache.fence import CompletedSteps, Fence
from worker.core.cache.pool import FencedPool
from worker.protocol.page_groups import PageGroups


class BlockPool:
    """Allocates blocks of pages: one page in each full-attention group and, while queries may
    attend to it, one in each window group. Leases and the prefix cache refer to blocks by number;
    numbers are never reused.

        take ──> used by leases ──end_use──> used by none ─┬─ cached: idle, until pages run out
                      ^                                    │              │
                      └───────────── use ──────────────────┼──────────────┤
                                                           └─ else ──> window pages are free

    The window pages of a block can thus be freed while its other pages stay cached. A request
    cannot continue a cached prefix that ends less than a window after such a block.

    Args:
        pages: pool of all device pages.
        groups: layer groups of the model, including window groups.
        page_size: tokens per page.
        steps: the completed steps.
    """

    def __init__(
        self, pages: FencedPool, groups: PageGroups, page_size: int, steps: CompletedSteps
    ) -> None:
        self.groups = groups
        self._pages = pages
        self._page_size = page_size
        self._next = 1
        self._full: dict[int, list[int]] = {}
        """Pages in full-attention groups, by block."""
        self._window: dict[int, list[int]] = {}
        """Pages in window groups, by block (only blocks that still have them)."""
        self._users: dict[int, int] = {}
        """Number of leases that may read a block's window pages, by block; zeros are omitted."""
        self._cached: set[int] = set()
        """Blocks in the prefix cache."""
        self._behind: OrderedDict[int, None] = OrderedDict()
        """Idle blocks behind the window of the lease that used them, oldest first; these are
        reclaimed first."""
        self._ends: OrderedDict[int, None] = OrderedDict()
        """Idle blocks within a window of a lease's end. A request that continues there needs them,
        so they are reclaimed last."""
        self._fence = Fence[tuple[int, bool]](steps, lambda use: self._end_use(*use))
        """Uses of window pages that end when a step completes: block, and whether the lease ends
        within a window of it."""

    @property
    def num_idle_pages(self) -> int:
        """Number of window pages of idle blocks that `reclaim` can free."""
        return self.groups.num_window * (len(self._behind) + len(self._ends))

    @property
    def num_fenced(self) -> int:
        """Number of uses of window pages that end with a step in flight."""
        return len(self._fence)

    def take(self, count: int, *, seen: bool = True) -> list[int]:
        """Allocates blocks for one lease; the caller must check that enough pages are free.

        Args:
            count: number of blocks.
            seen: whether the lease reads the blocks' window pages; if not, none are allocated.
        """
        blocks = list(range(self._next, self._next + count))
        self._next += count
        for block in blocks:
            self._full[block] = self._pages.take(self.groups.num_full)
            if seen:
                self._window[block] = self._pages.take(self.groups.num_window)
                self._users[block] = 1
        return blocks

    def pages(self, block: int) -> tuple[list[int], list[int]]:
        """Pages of a block in full-attention groups, and in window groups if it has them."""
        return self._full[block], self._window.get(block, [])

    def rows(self, blocks: Sequence[int], start: int, first: int) -> list[tuple[int, list[int]]]:
        """Page-table entries of a request, starting with a given block: for each group, the index
        of the first page and the page ids.

        Args:
            blocks: blocks of the request.
            start: index of the first block to include.
            first: index of the first block that has window pages.
        """
        num_full, num_window = self.groups.num_full, self.groups.num_window
        full = [self._full[block] for block in blocks[start:]]
        rows = [(start, [pages[group] for pages in full]) for group in range(num_full)]
        start = max(start, first)
        seen = [self._window[block] for block in blocks[start:]]
        return rows + [(start, [pages[group] for pages in seen]) for group in range(num_window)]

    def longest_hit(self, blocks: Sequence[int], on_host: Sequence[bool] = ()) -> int:
        """Number of blocks in the longest prefix that a request can continue. All blocks within the
        window at its end must still have their window pages.

        Args:
            blocks: blocks on the device.
            on_host: for each following block in host memory, whether it has window pages.
        """
        num_device = len(blocks)
        count = index = num_device + len(on_host)
        while index > self.first_seen(count):
            index -= 1
            is_seen = (
                blocks[index] in self._window if index < num_device else on_host[index - num_device]
            )
            if not is_seen:
                count = index  # prefixes that end within its window cannot be continued either
        return count

    def first_seen(self, num_blocks: int) -> int:
        """Index of the first block whose window pages are needed to continue after `num_blocks`
        blocks."""
        return min(
            num_blocks, self.groups.first_block(num_blocks * self._page_size, self._page_size)
        )

    def num_idle(self, blocks: Iterable[int]) -> int:
        """Number of `blocks` that have idle window pages, which no lease uses."""
        return sum(block in self._behind or block in self._ends for block in blocks)

    def num_used_alone(self, blocks: Iterable[int]) -> int:
        """Number of `blocks` (all used by one lease) that no other lease uses."""
        return sum(self._users[block] == 1 for block in blocks)

    def use(self, blocks: Iterable[int]) -> None:
        """Adds a user to the window pages of `blocks`."""
        for block in blocks:
            self._users[block] = self._users.get(block, 0) + 1
            self._behind.pop(block, None)
            self._ends.pop(block, None)

    def end_use(self, blocks: Iterable[int], fence: int, *, lease_ends: bool) -> None:
        """Ends a lease's use of window pages once step `fence` has completed.

        Args:
            blocks: blocks whose window pages the lease used.
            fence: last step that may read them.
            lease_ends: whether the lease ends within a window of `blocks`.
        """
        passed = self._fence.passed(fence)
        for block in blocks:
            if passed:
                self._end_use(block, lease_ends)
            else:
                self._fence.hold((block, lease_ends), fence)

    def cache(self, blocks: Iterable[int]) -> None:
        """Marks `blocks` as part of the prefix cache."""
        self._cached.update(blocks)

    def move_window(self, block: int, cached: int) -> bool:
        """Moves the window pages and users of a lease's block to a cached block with the same
        tokens, if the window pages of the cached block have been freed. Returns whether they were
        moved."""
        if cached in self._window or block not in self._window:
            return False
        self._window[cached] = self._window.pop(block)
        self._users[cached] = self._users.pop(block)
        return True

    def release(self, blocks: Iterable[int], fence: int) -> None:
        """Frees blocks that are not cached: the full-attention pages after step `fence` has
        completed, the window pages when their uses end."""
        for block in blocks:
            self._pages.release(self._full.pop(block), fence)

    def evict(self, blocks: Iterable[int]) -> None:
        """Frees blocks evicted from the prefix cache; no step in flight reads them."""
        for block in blocks:
            self._cached.remove(block)
            self._pages.release(self._full.pop(block), 0)
            if block in self._window:
                self._free_window(block)

    def reclaim(self, count: int, *, ends: bool) -> None:
        """Frees idle window pages until `count` pages are free or no idle ones are left. Frees
        pages behind a window or, with `ends`, those within a window of a lease's end."""
        idle = self._ends if ends else self._behind
        while idle and self._pages.num_free < count:
            self._free_window(next(iter(idle)))

    def check_invariants(
        self, cached: Sequence[int], uncached: Sequence[int], used: Sequence[int]
    ) -> None:
        """Asserts that each page has exactly one owner.

        Args:
            cached: all blocks in the prefix cache.
            uncached: all blocks that only belong to a lease.
            used: blocks whose window pages are used by leases; a block is repeated for each lease
                that uses it.
        """
        assert self._cached == set(cached), "cached blocks miscounted"
        assert len(cached) + len(uncached) == len(self._full), (
            "a block is leaked, or has two owners"
        )
        assert set(cached) | set(uncached) == set(self._full), "a block without an owner"
        users: dict[int, int] = {}
        for block in [*used, *(block for block, _ in self._fence)]:
            users[block] = users.get(block, 0) + 1
        assert users == self._users, "uses of window pages miscounted"
        idle = [*self._behind, *self._ends]
        assert len(set(idle)) == len(idle), "a block is idle twice"
        assert set(idle) <= self._cached, "window pages that are not cached are kept"
        assert sorted([*idle, *users]) == sorted(self._window), "window pages neither used nor idle"
        both = (self._full, self._window)
        self._pages.check_invariants(
            page for tables in both for ids in tables.values() for page in ids
        )

    def _end_use(self, block: int, lease_ends: bool) -> None:
        self._users[block] -= 1
        if self._users[block]:
            return
        del self._users[block]
        if block in self._cached:
            (self._ends if lease_ends else self._behind)[block] = None
        else:
            self._free_window(block)

    def _free_window(self, block: int) -> None:
        self._behind.pop(block, None)
        self._ends.pop(block, None)
        self._pages.release(self._window.pop(block), 0)
