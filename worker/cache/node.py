"""One node of the radix tree: a run of pages on the only path that continues its parent's."""

from __future__ import annotations


class Node:
    """A run of cached pages; a root has none and stands for one cache salt.

    Args:
        parent: None for a root, and again once the node has left the tree.
        key: token ids of its pages, little-endian int32; of a root its cache salt.
        pages: page ids.
        hashes: block hash per page; for a root the one hash that starts the chain.
        serial: counts the nodes of a tree; breaks ties between equal `last_use`.
    """

    __slots__ = ("children", "hashes", "key", "last_use", "locks", "pages", "parent", "serial")

    def __init__(
        self, parent: Node | None, key: bytes, pages: list[int], hashes: list[int], serial: int
    ) -> None:
        self.parent = parent
        self.key = key
        self.pages = pages
        self.hashes = hashes
        self.serial = serial
        self.children: dict[bytes, Node] = {}
        """By the token ids of the child's first page."""
        self.locks = 0
        """Locks on this node or below it."""
        self.last_use = 0
        """Tick of the tree's clock when a lock last left it."""

    @property
    def is_root(self) -> bool:
        """Whether it stands for a salt. Roots have no pages, other nodes at least one."""
        return not self.pages

    def common_pages(self, key: bytes, start: int, width: int) -> int:
        """How many leading pages equal those of `key` from byte `start`; a page has `width`."""
        if key.startswith(self.key, start):
            return len(self.pages)
        count = 0
        for offset in range(0, min(len(self.key), len(key) - start) - width + 1, width):
            if not key.startswith(self.key[offset : offset + width], start + offset):
                break
            count += 1
        return count
