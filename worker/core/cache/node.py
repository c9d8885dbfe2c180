"""One node of the radix tree: a run of pages on the only path that continues its parent's."""

from __future__ import annotations

from math import exp, log


class Node:
    """A run of cached pages in one tier; a root has none and stands for one cache salt.

    Below a run in host memory there are only such runs: a request could use none of the others.

    Args:
        parent: None for a root, and again once the node has left the tree.
        key: token ids of its pages, little-endian int32; of a root its cache salt.
        pages: page ids; of a run in host memory its slots.
        hashes: block hash per page; for a root the one hash that starts the chain.
        serial: counts the nodes of a tree; breaks ties between equal ranks.
    """

    __slots__ = (
        "children",
        "hashes",
        "key",
        "last_use",
        "locks",
        "num_device_children",
        "on_host",
        "pages",
        "parent",
        "rank",
        "serial",
        "weight",
    )

    def __init__(
        self, parent: Node | None, key: bytes, pages: list[int], hashes: list[int], serial: int
    ) -> None:
        self.parent = parent
        self.key = key
        self.pages = pages
        self.hashes = hashes
        self.serial = serial
        self.children: dict[bytes, Node] = {}
        """Children by the token ids of their first page."""
        self.num_device_children = 0
        """Children that are not in host memory."""
        self.on_host = False
        """Whether it is in host memory; never while it is locked, but for a moment."""
        self.locks = 0
        """Locks on this node or below it."""
        self.last_use = 0
        """Tick of the tree's clock at which it was last touched."""
        self.weight = 1.0
        """Sum of its uses at `last_use`, older ones weighing less; at least 1."""
        self.rank = 0.0
        """Tick at which a node of weight 1 would be worth as much: eviction takes the least."""

    @property
    def is_root(self) -> bool:
        """Whether it stands for a salt. Roots have no pages, other nodes at least one."""
        return not self.pages

    def touch(self, now: int, num_uses: int, window: float) -> None:
        """Enters uses, or a lock given back, at a tick of the tree's clock.

        LRFU (Lee et al. 2001, "LRFU: a spectrum of policies that subsumes the least recently used
        and least frequently used policies"): a use weighs exp(-ticks / window). With one use, or
        none that is remembered, the rank is the tick itself, as in LRU.
        """
        self.weight = max(1.0, self.weight * exp((self.last_use - now) / window) + num_uses)
        self.last_use = now
        self.rank = now + window * log(self.weight)

    def common_pages(self, key: bytes, start: int, width: int) -> int:
        """Number of leading pages that equal those of `key` from byte `start`; a page has `width`
        bytes."""
        if key.startswith(self.key, start):
            return len(self.pages)
        count = 0
        for offset in range(0, min(len(self.key), len(key) - start) - width + 1, width):
            if not key.startswith(self.key[offset : offset + width], start + offset):
                break
            count += 1
        return count

    def cut_head(self, count: int, width: int, serial: int) -> Node:
        """Cuts off the first `count` pages; returns them as a new node above this one.

        Paths that ended at the end of this node still do.
        """
        parent, cut = self.parent, count * width
        assert parent is not None
        upper = Node(parent, self.key[:cut], self.pages[:count], self.hashes[:count], serial)
        upper._stand_beside(self)
        upper.num_device_children = int(not self.on_host)
        parent.children[upper.key[:width]] = upper
        self.key = self.key[cut:]
        del self.pages[:count], self.hashes[:count]
        upper.children[self.key[:width]] = self
        self.parent = upper
        return upper

    def cut_tail(self, count: int, width: int, serial: int) -> Node:
        """Cuts off all but the first `count` pages; returns them as a new node below this one, with
        all that was below it.

        The node is not locked, since paths that end at its end would no longer do so. Takes less
        time than `cut_head` where the tail is short.
        """
        assert not self.locks
        cut = count * width
        lower = Node(self, self.key[cut:], self.pages[count:], self.hashes[count:], serial)
        lower._stand_beside(self)
        lower._adopt(self)
        self.children = {lower.key[:width]: lower}
        self.num_device_children = int(not self.on_host)
        self.key = self.key[:cut]
        del self.pages[count:], self.hashes[count:]
        return lower

    def absorb(self, child: Node) -> None:
        """Merges the only child, which is in the same tier and unlocked as this node is."""
        assert child.on_host == self.on_host
        assert not self.locks
        assert not child.locks
        self.key += child.key
        self.pages += child.pages
        self.hashes += child.hashes
        self._adopt(child)
        child.parent = None

    def _stand_beside(self, other: Node) -> None:
        self.locks = other.locks
        self.last_use, self.weight, self.rank = other.last_use, other.weight, other.rank
        self.on_host = other.on_host

    def _adopt(self, other: Node) -> None:
        self.children, other.children = other.children, {}
        self.num_device_children = other.num_device_children
        for child in self.children.values():
            child.parent = self
