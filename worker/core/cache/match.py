"""What a look-up in the prefix cache finds."""

from __future__ import annotations

from typing import NamedTuple

from worker.core.cache.node import Node


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
