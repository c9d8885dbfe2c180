"""InFlight: a tree of the prompts that were sent to workers and have not been computed yet."""

from __future__ import annotations

from worker.protocol.blocks import BlockHashes


class PrefixNode:
    """A run of blocks shared by prompts in flight; the root's run is empty."""

    __slots__ = ("children", "counts", "end", "hashes", "mask", "parent", "start")

    def __init__(
        self, parent: PrefixNode | None, hashes: BlockHashes | None, start: int, end: int
    ) -> None:
        self.parent = parent
        self.hashes = hashes
        """Block hashes of a complete prompt; the node's run is `hashes[start:end]`."""
        self.start = start
        self.end = end
        self.children: dict[int, PrefixNode] = {}
        """Child nodes by the hash of their first block."""
        self.counts: dict[int, int] = {}
        """Number of requests whose prompts contain this run, by row of their worker."""
        self.mask = 0
        """Rows in `counts` as a bit set."""


class InFlight:
    """A radix tree over block hashes, with which requests of a burst find their common prefixes.

    Hashes are chained: two prompts have equal hashes up to the end of their common prefix, and
    different ones after it. That end is found by bisection, in O(log n) per node; blocks are not
    inserted individually.
    """

    def __init__(self) -> None:
        self._root = PrefixNode(None, None, 0, 0)

    def __len__(self) -> int:
        """Number of prompts in flight."""
        return sum(self._root.counts.values())

    @property
    def has_prompts(self) -> bool:
        """Whether any prompt with a full block is in flight."""
        return bool(self._root.children)

    def match(self, hashes: BlockHashes) -> list[tuple[int, int]]:
        """Prefixes that `hashes` shares with prompts in flight, shortest first.

        Returns:
            For each prefix: the rows of workers as a bit set, and its length in blocks.
        """
        node, at, count = self._root, 0, len(hashes)
        found: list[tuple[int, int]] = []
        while at < count:
            child = node.children.get(hashes.item(at))
            if child is None:
                break
            at = _common(child, hashes, min(child.end, count))
            found.append((child.mask, at))
            if at < child.end:
                break
            node = child
        return found

    def add(self, hashes: BlockHashes, row: int) -> PrefixNode:
        """Adds the prompt of a request sent to the worker in `row`; returns its last node."""
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
        """Removes a prompt, given the node returned by `add` and its row."""
        _count(node, row, -1)
        while (parent := node.parent) is not None:
            if not node.counts:
                assert node.hashes is not None, "only the root has no blocks"
                del parent.children[node.hashes.item(node.start)]
            node = parent
            _count(node, row, -1)

    def _split(self, node: PrefixNode, at: int) -> PrefixNode:
        """Splits a node before block `at`; returns the upper part. The lower part remains the same
        object, to which prompts that end there refer."""
        assert node.parent is not None
        assert node.hashes is not None
        upper = PrefixNode(node.parent, node.hashes, node.start, at)
        upper.counts = dict(node.counts)
        upper.mask = node.mask
        node.parent.children[node.hashes.item(node.start)] = upper
        upper.children[node.hashes.item(at)] = node
        node.parent, node.start = upper, at
        return upper


def _common(node: PrefixNode, hashes: BlockHashes, end: int) -> int:
    """Index of the first block before `end` at which `hashes` differ from the node's; `end` if
    there is none. The node's first block must be equal."""
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
    before = node.counts.get(row, 0)
    left = before + change
    if left:
        node.counts[row] = left
        if not before:
            node.mask |= 1 << row
    else:
        del node.counts[row]
        node.mask &= ~(1 << row)
