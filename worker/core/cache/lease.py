"""What one running request holds of the cache."""

from __future__ import annotations

from dataclasses import dataclass, field

from worker.core.cache.node import Node
from worker.core.cache.snapshots import PendingSnapshot


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
