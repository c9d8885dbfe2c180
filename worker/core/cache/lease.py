"""Match: result of a look-up in the prefix cache. Lease: what a running request holds of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from worker.core.cache.node import Node
from worker.core.cache.snapshots import PendingSnapshot


class Match(NamedTuple):
    """The longest cached prefix of some tokens."""

    node: Node | None
    """Last node of the part on the device; None if nothing there matched."""
    pages: list[int]
    """Pages of the part on the device (blocks, where layers see a window)."""
    num_unlocked: int
    """Pages of all groups of layers that no lease has locked: to lock them makes them
    unevictable."""
    host_node: Node | None = None
    """Last node of the match if it ends in host memory, else None."""
    num_host: int = 0
    """Pages in host memory, which follow those on the device."""
    borders: tuple[int, ...] = ()
    """Positions at which a request that continues here should snapshot its state, where layers keep
    one: the end of the cached pages (the match ends at the last snapshot before) and of the full
    pages of the tokens looked up."""

    @property
    def num_pages(self) -> int:
        """Pages in both tiers."""
        return len(self.pages) + self.num_host


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """A slot, the pages of the slot's page-table row, and a lock on the cached ones.

        pages   │ cached: the tree's, or duplicates of it │ not cached: the request's own │
                0 ───────────────────────────── num_cached_pages ───────────────────── len(pages)

    A request keeps reading the pages its page-table row names. Where the tree had the same tokens
    already when it wanted to cache a page of its own, that page is a duplicate: it stays the
    request's until the lease is released, because the row on the device still names it.

    Where layers see a window, "page" is a block (see BlockPool).
    """

    slot: int
    pages: list[int]
    node: Node | None
    """Last node of the cached prefix, locked; None where the lease stays out of the cache."""
    num_cached_pages: int
    first_seen: int = 0
    """Index of the first page that layers with a window may still read."""
    duplicates: list[int] = field(default_factory=list)
    """The request's own pages that are cached under other numbers."""
    borders: tuple[int, ...] = ()
    """Positions at which the state is to be snapshot, where layers keep one (`Match.borders`)."""
    snapshots: list[PendingSnapshot] = field(default_factory=list)
    """Snapshots that steps in flight store."""
    rolling_page: int = 0
    """Cached page whose snapshot a later one of this lease replaces; 0 for none."""
    fence: int = 0
    """Last launched step that touches the slot and the pages."""
