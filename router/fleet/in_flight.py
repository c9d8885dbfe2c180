"""The prompts in flight: of requests that workers were sent and have not computed yet."""

from __future__ import annotations

from worker.wire.blocks import BlockHashes


class PrefixNode:
    """A run of blocks that some requests in flight share; the root has none.

    The root's children begin with a first block, a node's children with the block after its last.
    """

    __slots__ = ("children", "counts", "end", "hashes", "mask", "parent", "start", "total")

    def __init__(
        self, parent: PrefixNode | None, hashes: BlockHashes | None, start: int, end: int
    ) -> None:
        self.parent = parent
        self.hashes = hashes
        """Hashes of a whole prompt; the node is the part from `start` to `end`."""
        self.start = start
        self.end = end
        self.children: dict[int, PrefixNode] = {}
        self.counts: dict[int, int] = {}
        """Requests by row of their worker, this node's and those below it."""
        self.mask = 0
        """The rows in `counts`, as bits."""
        self.total = 0
        """Requests in `counts`."""


class InFlight:
    """A path-compressed tree of chained hashes: requests of a burst find each other in it.

    Its blocks are distinguished by position as well as by hash, so equal prefixes end where two
    hashes first differ: by bisection, O(log n) per branch, and none of a prompt's blocks is
    entered one by one.
    """

    def __init__(self) -> None:
        self._root = PrefixNode(None, None, 0, 0)

    def __len__(self) -> int:
        return self._root.total

    def match(self, hashes: BlockHashes) -> list[tuple[int, int, int]]:
        """(rows as bits, leading blocks, requests) of those that share a prefix; lengths rise."""
        node, at, count = self._root, 0, len(hashes)
        found: list[tuple[int, int, int]] = []
        while at < count:
            child = node.children.get(hashes.item(at))
            if child is None:
                break
            at = _common(child, hashes, min(child.end, count))
            found.append((child.mask, at, child.total))
            if at < child.end:
                break
            node = child
        return found

    def add(self, hashes: BlockHashes, row: int) -> PrefixNode:
        """A request is sent to the worker in `row`; returns what `remove` takes."""
        node, at, count = self._root, 0, len(hashes)
        _count(node, row, 1)
        while at < count:
            key = hashes.item(at)
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = PrefixNode(node, hashes, at, count)
                at = count
            else:
                at = _common(child, hashes, min(child.end, count))
                if at < child.end:
                    child = self._split(child, at)
            node = child
            _count(node, row, 1)
        return node

    def remove(self, node: PrefixNode, row: int) -> None:
        """The worker has computed the request, or never will."""
        _count(node, row, -1)
        while (parent := node.parent) is not None:
            if not node.total:
                assert node.hashes is not None, "only the root has no blocks"
                del parent.children[node.hashes.item(node.start)]
            node = parent
            _count(node, row, -1)

    def _split(self, node: PrefixNode, at: int) -> PrefixNode:
        """Cuts a node before block `at`; returns the upper part. The lower one stays the object
        that requests ended in."""
        assert node.parent is not None
        assert node.hashes is not None
        upper = PrefixNode(node.parent, node.hashes, node.start, at)
        upper.counts = dict(node.counts)
        upper.mask, upper.total = node.mask, node.total
        node.parent.children[node.hashes.item(node.start)] = upper
        upper.children[node.hashes.item(at)] = node
        node.parent, node.start = upper, at
        return upper


def _common(node: PrefixNode, hashes: BlockHashes, end: int) -> int:
    """The place at which `hashes`, which agree with the node's first block, first differ from
    it."""
    mine = node.hashes
    assert mine is not None
    if mine.item(end - 1) == hashes.item(end - 1):
        return end
    low, high = node.start, end - 1
    while high - low > 1:
        middle = (low + high) // 2
        if mine.item(middle) == hashes.item(middle):
            low = middle
        else:
            high = middle
    return high


def _count(node: PrefixNode, row: int, change: int) -> None:
    left = node.counts.get(row, 0) + change
    node.total += change
    if left:
        node.counts[row] = left
        node.mask |= 1 << row
    else:
        del node.counts[row]
        node.mask &= ~(1 << row)
