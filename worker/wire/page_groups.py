"""How a model's layers share the pages of a KV cache, and what a request takes of them."""

from __future__ import annotations

from typing import Final

import msgspec

UNBOUNDED = 1 << 40
"""Tokens of a request whose layers all see a window: its pages do not grow with it."""
LEAST_SNAPSHOTS = 4
"""So that a request that has the cache for itself can keep what it has computed last: what a step
loads, and what two steps store."""


class PageGroups(msgspec.Struct, array_like=True, frozen=True):
    """Groups of equally many layers. Each has pages of its own for every request.

        page of a group    page_size tokens, in each of its layers
        block of a request page_size positions: a page in every group

    All pages are equally large, so any of them may belong to any group. Full groups keep a page of
    each block; window groups give those back that no later position sees.
    """

    num_full: int = 1
    """Groups whose layers attend to all positions before."""
    num_window: int = 0
    """Groups whose layers see a window; they come after the full ones."""
    window: int = 0
    """Positions that these see at most, a query's own included; 0 without such groups."""
    snapshot_pages: int = 0
    """Pages that take as much memory as a request's state, where layers keep one: a prefix that is
    so long has a snapshot of the state at its end. 0 where no layer keeps any, or nothing is to be
    cached."""

    @property
    def num_groups(self) -> int:
        """Pages that a block takes."""
        return self.num_full + self.num_window

    def num_snapshots(self, num_pages: int) -> int:
        """Snapshots beside so many pages: as much memory as these, where layers keep a state."""
        if not self.snapshot_pages:
            return 0
        return max(LEAST_SNAPSHOTS, num_pages // self.snapshot_pages)

    def first_block(self, position: int, page_size: int) -> int:
        """The first block of which a query at `position`, or a later one, reads pages of window
        groups."""
        return max(0, position + 1 - self.window) // page_size

    def most_window_blocks(self, page_size: int, step_tokens: int) -> int:
        """Blocks of which a request needs the pages of a window group, at most: those of the window
        and of a step of so many tokens, wherever in a page these begin."""
        return -(-(self.window - 1) // page_size) + -(-step_tokens // page_size) + 1

    def num_pages(self, num_tokens: int, page_size: int, step_tokens: int) -> int:
        """Pages that a request of so many tokens takes at most, at any one time.

        Args:
            num_tokens: its length.
            page_size: tokens per page.
            step_tokens: most tokens of one step.
        """
        num_blocks = -(-num_tokens // page_size)
        if not self.num_window:
            return self.num_full * num_blocks
        window_blocks = min(num_blocks, self.most_window_blocks(page_size, step_tokens))
        return self.num_full * num_blocks + self.num_window * window_blocks

    def max_tokens(self, num_pages: int, page_size: int, step_tokens: int) -> int:
        """The longest request that so many pages hold; UNBOUNDED where its length does not matter.

        Args:
            num_pages: that requests can use.
            page_size: tokens per page.
            step_tokens: most tokens of one step.
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
"""All layers attend to all positions."""
