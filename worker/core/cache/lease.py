"""What a look-up in the prefix cache finds, and what one running request holds of the cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from worker.core.cache.node import Node
from worker.core.cache.snapshots import PendingSnapshot


class Match(NamedTuple):
    """The longest cached prefix of some tokens."""

    node: Node | None
    """Where the part on the device ends; None if nothing there matched."""
    pages: list[int]
    num_unlocked: int
    """How many pages, of all groups of layers, nobody has locked: locking them makes them
    unevictable."""
    host_node: Node | None = None
    """Where it ends, if that is in host memory."""
    num_host: int = 0
    """Pages in host memory, after those on the device."""
    borders: tuple[int, ...] = ()
    """Positions at which the state of whoever goes on from here is worth a snapshot: where the
    cached pages end, of which only those before a snapshot count, and where all of them will."""

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
    """Where the cached prefix ends in the tree, locked; None without a prefix cache."""
    num_cached_pages: int
    first_seen: int = 0
    """Place of the first of the pages that may still be read in layers that see a window."""
    duplicates: list[int] = field(default_factory=list)
    borders: tuple[int, ...] = ()
    """Positions at which the state is worth a snapshot, where layers keep one."""
    snapshots: list[PendingSnapshot] = field(default_factory=list)
    """Those that steps in flight store."""
    rolling_page: int = 0
    """The cached page with its last snapshot that a later one replaces; 0 for none."""
    fence: int = 0
    """The last step launched that touches the slot and the pages."""
