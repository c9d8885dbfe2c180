"""Node of the radix tree: a run of pages on a path."""

from __future__ import annotations

from math import exp, log


class Node:
    """A run of cached pages in one tier; a root has no pages and stands for one cache salt.

    All runs below a run in host memory are in host memory, too: the device part of a match always
    precedes its host part.

    Args:
        parent: None for a root, and after the node was removed from the tree.
        key: token ids of its pages, little-endian int32; for a root, its cache salt.
        pages: page ids; for a run in host memory, slots.
        hashes: block hash per page; for a root, the single hash that starts the chain.
        serial: serial number in the tree; breaks ties between equal ranks.
    """

    __slots__ = (
        "children",
        "hashes",
        "key",
        "last_use",
        "loading",
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
        """Number of children on the device."""
        self.on_host = False
        """Whether the run is in host memory; such runs are only locked while being loaded."""
        self.loading = 0
        """Last Plan that loads the node's pages from host memory; 0 if there is none."""
        self.locks = 0
        """Number of locks on this node or below it."""
        self.last_use = 0
        """Tick of the tree's clock at the last use."""
        self.weight = 1.0
        """Decayed number of uses as of `last_use`; at least 1."""
        self.rank = 0.0
        """Eviction rank: the tick at which a single use would have the same weight. The lowest rank
        is evicted first."""

    @property
    def is_root(self) -> bool:
        """Whether the node is a root. Roots have no pages, other nodes at least one."""
        return not self.pages

    def touch(self, now: int, num_uses: int, window: float) -> None:
        """Records uses, or the release of a lock, at a tick of the tree's clock.

        LRFU (Lee et al. 2001, "LRFU: a spectrum of policies that subsumes the least recently used
        and least frequently used policies"): a use has weight exp(-ticks / window). With a single
        recent use, the rank is the tick itself, as in LRU.
        """
        self.weight = max(1.0, self.weight * exp((self.last_use - now) / window) + num_uses)
        self.last_use = now
        self.rank = now + window * log(self.weight)

    def common_pages(self, key: bytes, start: int, width: int) -> int:
        """Number of leading pages (`width` bytes each) that match those of `key`, starting at byte
        `start`."""
        if key.startswith(self.key, start):
            return len(self.pages)
        count = 0
        for offset in range(0, min(len(self.key), len(key) - start) - width + 1, width):
            if not key.startswith(self.key[offset : offset + width], start + offset):
                break
            count += 1
        return count

    def cut_head(self, count: int, width: int, serial: int) -> Node:
        """Splits off the first `count` pages; returns them as a new node above this one.

        Paths that end at this node are unaffected.
        """
        parent, cut = self.parent, count * width
        assert parent is not None
        upper = Node(parent, self.key[:cut], self.pages[:count], self.hashes[:count], serial)
        upper._copy_usage(self)
        upper.num_device_children = int(not self.on_host)
        parent.children[upper.key[:width]] = upper
        self.key = self.key[cut:]
        del self.pages[:count], self.hashes[:count]
        upper.children[self.key[:width]] = self
        self.parent = upper
        return upper

    def cut_tail(self, count: int, width: int, serial: int) -> Node:
        """Splits off all but the first `count` pages; returns them as a new node below this one,
        with all nodes that were below it.

        The node must not be locked, since paths that end at this node would change. Faster than
        `cut_head` if the tail is short.
        """
        assert not self.locks
        cut = count * width
        lower = Node(self, self.key[cut:], self.pages[count:], self.hashes[count:], serial)
        lower._copy_usage(self)
        lower._take_children(self)
        self.children = {lower.key[:width]: lower}
        self.num_device_children = int(not self.on_host)
        self.key = self.key[:cut]
        del self.pages[count:], self.hashes[count:]
        return lower

    def absorb(self, child: Node) -> None:
        """Merges the only child; both nodes must be unlocked and in the same tier."""
        assert child.on_host == self.on_host
        assert not self.locks
        assert not child.locks
        self.key += child.key
        self.pages += child.pages
        self.hashes += child.hashes
        self._take_children(child)
        child.parent = None

    def _copy_usage(self, other: Node) -> None:
        self.locks, self.loading = other.locks, other.loading
        self.last_use, self.weight, self.rank = other.last_use, other.weight, other.rank
        self.on_host = other.on_host

    def _take_children(self, other: Node) -> None:
        self.children, other.children = other.children, {}
        self.num_device_children = other.num_device_children
        for child in self.children.values():
            child.parent = self
