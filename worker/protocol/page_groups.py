"""Page groups: groups of a model's layers with pages of their own, and what a request takes."""

from __future__ import annotations

from typing import Final

import msgspec

UNBOUNDED = 1 << 40
"""Length in tokens of a request whose layers all see a window: its pages do not grow with it."""
LEAST_SNAPSHOTS = 4
"""Least number of snapshots, with which a request that has the cache for itself can keep what it
has computed last: those that a step loads, and those that two steps store."""


class PageGroups(msgspec.Struct, array_like=True, frozen=True):
    """Groups of equally many layers, each with pages of its own for every request.

        page of a group    page_size tokens, in each of its layers
        block of a request page_size positions: a page in every group

    All pages are equally large, so any of them may belong to any group. Full groups keep a page of
    each block; window groups give those back that no later position sees.
    """

    num_full: int = 1
    """Number of full groups, whose layers attend to all earlier positions."""
    num_window: int = 0
    """Number of window groups, whose layers see a sliding window; they come after the full ones."""
    window: int = 0
    """Most positions that a window group sees, the query's own included; 0 without such groups."""
    snapshot_pages: int = 0
    """Pages that take as much memory as a state of linear attention: there is a snapshot of the
    state for every so many pages of a prefix. 0 where layers keep no state, or without prefix
    caching."""

    @property
    def num_groups(self) -> int:
        """Number of groups, which is that of the pages of a block."""
        return self.num_full + self.num_window

    def num_snapshots(self, num_pages: int) -> int:
        """Number of snapshots beside `num_pages` pages, which take as much memory; 0 without
        states."""
        if not self.snapshot_pages:
            return 0
        return max(LEAST_SNAPSHOTS, num_pages // self.snapshot_pages)

    def first_block(self, position: int, page_size: int) -> int:
        """Index of the first block whose window pages queries at `position` or later read."""
        return max(0, position + 1 - self.window) // page_size

    def most_window_blocks(self, page_size: int, step_tokens: int) -> int:
        """Most blocks whose window pages a request needs at a time: those of the window and of a
        step of `step_tokens`, wherever in a page they begin."""
        return -(-(self.window - 1) // page_size) + -(-step_tokens // page_size) + 1

    def num_pages(self, num_tokens: int, page_size: int, step_tokens: int) -> int:
        """Most pages that a request takes at a time.

        Args:
            num_tokens: length of the request.
            page_size: tokens per page.
            step_tokens: token budget of one step.
        """
        num_blocks = -(-num_tokens // page_size)
        if not self.num_window:
            return self.num_full * num_blocks
        window_blocks = min(num_blocks, self.most_window_blocks(page_size, step_tokens))
        return self.num_full * num_blocks + self.num_window * window_blocks

    def max_tokens(self, num_pages: int, page_size: int, step_tokens: int) -> int:
        """Length in tokens of the longest request that fits; UNBOUNDED where any does.

        Args:
            num_pages: pages that requests can use.
            page_size: tokens per page.
            step_tokens: token budget of one step.
        """
        num_blocks = num_pages // self.num_groups
        if self.num_window:
            most = self.most_window_blocks(page_size, step_tokens)
            if num_blocks >= most:
                if not self.num_full:
                    return UNBOUNDED
                num_blocks = (num_pages - self.num_window * most) // self.num_full
        return num_blocks * page_size


ONE_GROUP: Final = PageGroups()
"""Groups of a model whose layers all attend to all positions: one full group."""
