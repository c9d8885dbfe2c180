"""Page groups: groups of layers with separate pages, and the number of pages that a
request needs."""

from __future__ import annotations

from typing import Final

import msgspec

UNBOUNDED = 1 << 40
"""Maximum length, in tokens, if all layers use sliding windows: the number of pages then does not
grow with the length."""
MIN_SNAPSHOTS = 4
"""Minimum number of snapshots with which a single request can always cache its latest state: those
that a step loads, plus those that two steps store."""


class PageGroups(msgspec.Struct, array_like=True, frozen=True):
    """Groups with equal numbers of layers; each has separate pages for every request.

        page of a group    page_size tokens, in each of its layers
        block of a request page_size positions: a page in every group

    All pages have the same size, so any page can belong to any group. Full-attention groups keep a
    page for each block; window groups free pages that no later position attends to.
    """

    num_full: int = 1
    """Number of full-attention groups."""
    num_window: int = 0
    """Number of sliding-window groups; they come after the full-attention groups."""
    window: int = 0
    """Window size in positions, including the query's; 0 if there are no sliding-window groups."""
    snapshot_pages: int = 0
    """Number of pages that take as much memory as one linear-attention state. One state snapshot is
    kept for this many pages of a prefix. 0 if layers have no states, or prefix caching is
    disabled."""

    @property
    def num_groups(self) -> int:
        """Number of groups, which is the number of pages per block."""
        return self.num_full + self.num_window

    def num_snapshots(self, num_pages: int) -> int:
        """Number of snapshots that take as much memory as `num_pages` pages; 0 if there are no
        states."""
        if not self.snapshot_pages:
            return 0
        return max(MIN_SNAPSHOTS, num_pages // self.snapshot_pages)

    def first_block(self, position: int, page_size: int) -> int:
        """Index of the first block whose window pages are needed by queries at or after
        `position`."""
        return max(0, position + 1 - self.window) // page_size

    def max_window_blocks(self, page_size: int, step_tokens: int) -> int:
        """Maximum number of window pages per group that a request needs at a time: the window plus
        one step of `step_tokens`, at any alignment."""
        return -(-(self.window - 1) // page_size) + -(-step_tokens // page_size) + 1

    def num_pages(self, num_tokens: int, page_size: int, step_tokens: int) -> int:
        """Maximum number of pages that a request needs at a time.

        Args:
            num_tokens: length of the request.
            page_size: tokens per page.
            step_tokens: token budget of one step.
        """
        num_blocks = -(-num_tokens // page_size)
        if not self.num_window:
            return self.num_full * num_blocks
        window_blocks = min(num_blocks, self.max_window_blocks(page_size, step_tokens))
        return self.num_full * num_blocks + self.num_window * window_blocks

    def max_tokens(self, num_pages: int, page_size: int, step_tokens: int) -> int:
        """Maximum length, in tokens, of a request that fits; UNBOUNDED if any request fits.

        Args:
            num_pages: pages available to requests.
            page_size: tokens per page.
            step_tokens: token budget of one step.
        """
        num_blocks = num_pages // self.num_groups
        if self.num_window:
            max_blocks = self.max_window_blocks(page_size, step_tokens)
            if num_blocks >= max_blocks:
                if not self.num_full:
                    return UNBOUNDED
                num_blocks = (num_pages - self.num_window * max_blocks) // self.num_full
        return num_blocks * page_size


ONE_GROUP: Final = PageGroups()
"""Page groups of a model in which all layers use full attention."""
