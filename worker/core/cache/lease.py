"""Match: the result of a prefix cache lookup. Lease: the slot and pages of a running request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from worker.core.cache.node import Node
from worker.core.cache.snapshots import PendingSnapshot


class Match(NamedTuple):
    """Longest cached prefix of a token sequence."""

    node: Node | None
    """Last node of the part on the device; None if nothing on the device matched."""
    pages: list[int]
    """Pages of the part on the device (blocks for models with sliding windows)."""
    num_unlocked: int
    """Number of pages over all layer groups that no lease has locked; locking makes them
    unevictable."""
    host_node: Node | None = None
    """Last node of the match if it ends in host memory; otherwise None."""
    num_host: int = 0
    """Number of pages in host memory, which follow those on the device."""
    num_alone: int = 0
    """Number of leading device pages that can be reused without those in host memory: fewer than
    `pages` if the window pages or the state at their end are missing. Only set if `num_host` is not
    0."""
    borders: tuple[int, ...] = ()
    """Positions at which a request that continues here should snapshot its state, for models with
    states: the end of the cached pages (the match ends at the last snapshot before it), and the end
    of the full pages of the tokens that were looked up."""
    loading: int = 0
    """Last Plan that loads any of `pages` from host memory for another request; 0 if there is
    none."""

    @property
    def num_pages(self) -> int:
        """Number of pages of the match, on the device and in host memory."""
        return len(self.pages) + self.num_host


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """A slot, the pages in the slot's page-table row, and a lock on the cached ones.

        pages   │ cached: the tree's, or duplicates │ not cached: the request's own │
                0 ───────────────────── num_cached_pages ─────────────────── len(pages)

    A request keeps reading the pages in its page-table row. If the tree already has the same tokens
    when a page is to be cached, that page is a duplicate: it stays with the lease until the lease
    is released, because the row on the device still refers to it.

    For models with sliding windows, "page" means block (see BlockPool).
    """

    slot: int
    pages: list[int]
    node: Node | None
    """Last node of the cached prefix, locked; None if the lease does not use the cache."""
    num_cached_pages: int
    first_seen: int = 0
    """Index of the first page that window layers may still read."""
    duplicates: list[int] = field(default_factory=list)
    """Pages of the request whose tokens are also cached in other pages."""
    borders: tuple[int, ...] = ()
    """Positions at which to snapshot the state, if layers have one (`Match.borders`)."""
    snapshots: list[PendingSnapshot] = field(default_factory=list)
    """Snapshots being stored by steps in flight."""
    rolling_page: int = 0
    """Cached page whose snapshot will be replaced by a later one of this lease; 0 if there is
    none.
    """
    state_start: int = 0
    """Minimum position that the slot's state will have reached after all steps planned so far."""
    state_end: int = 0
    """Maximum position that the slot's state has reached after the completed steps. With drafts,
    only the device knows the exact position."""
    fence: int = 0
    """Last launched step that uses the slot and the pages."""
    load_seq: int = 0
    """Last Plan with loads from host memory that rows of this lease read; 0 if there is none."""
