"""Prefix cache: a path-compressed radix tree of full pages, evicted least recently used first."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from worker.cache.fence import Fence
from worker.cache.node import Node
from worker.wire.blocks import TOKEN_BYTES, block_hashes, root_hash
from worker.wire.messages import BlockEvent, BlockRemoved, BlockStored


class Match(NamedTuple):
    """The longest cached prefix of some tokens."""

    node: Node | None
    """Where it ends; None if nothing matched."""
    pages: list[int]
    num_unlocked: int
    """How many of the pages nobody has locked: locking them makes them unevictable."""


class RadixTree:
    """Owns cached pages and hands them out for reading; tokens are compared exactly.

    A lock on a node protects it and all its ancestors, so what is not locked can be evicted from
    the leaves up. Every lock is given back by `unlock`, with the last step that read the pages.

    Args:
        page_size: tokens per page.
        block_hash_salt: mixed into block hashes.
    """

    def __init__(self, page_size: int, block_hash_salt: str) -> None:
        self.num_pages = 0
        """Pages in the tree."""
        self.num_evictable = 0
        """Pages that nobody has locked."""
        self._page_size = page_size
        self._width = page_size * TOKEN_BYTES
        self._block_hash_salt = block_hash_salt
        self._roots: dict[bytes, Node] = {}
        self._fence: Fence[Node] = Fence()
        self._clock = 0
        self._num_nodes = 0
        self._serial = 0
        # Candidates for eviction as (last_use, serial, node); stale entries are skipped when they
        # surface, and swept when they outnumber the nodes.
        self._leaves: list[tuple[int, int, Node]] = []
        self._events: list[BlockEvent] = []

    @property
    def num_fenced(self) -> int:
        """Locks that wait for a step in flight."""
        return len(self._fence)

    def match(self, key: bytes, max_pages: int, cache_salt: str) -> Match:
        """Finds the longest cached prefix of `key` of at most `max_pages` pages. Locks nothing."""
        node = self._roots.get(cache_salt.encode())
        if node is None:
            return Match(None, [], 0)
        key = key[: max_pages * self._width]
        pages: list[int] = []
        num_unlocked = 0
        while len(pages) < max_pages:
            start = len(pages) * self._width
            child = node.children.get(key[start : start + self._width])
            if child is None:
                break
            count = child.common_pages(key, start, self._width)
            if count < len(child.pages):
                child = self._split(child, count)
            node = child
            pages += child.pages
            if not child.locks:
                num_unlocked += count
        return Match(node if pages else None, pages, num_unlocked)

    def lock(self, node: Node | None, cache_salt: str) -> Node:
        """Protects the path to `node` (None: the root of `cache_salt`) from eviction."""
        if node is None:
            node = self._root(cache_salt)
        self._lock_up_to(node, None)
        return node

    def num_held_alone(self, node: Node) -> int:
        """Pages on the path to a locked node that no other lock protects."""
        count = 0
        above: Node | None = node
        while above is not None and above.locks == 1:
            count += len(above.pages)
            above = above.parent
        return count

    def unlock(self, node: Node, fence: int) -> None:
        """Gives a lock back, effective once step `fence`, the last that read the path, is over."""
        if self._fence.passed(fence):
            self._unlock(node)
        else:
            self._fence.hold(node, fence)

    def complete(self, seq: int) -> None:
        """Gives back the locks that waited for steps up to `seq`."""
        for node in self._fence.complete(seq):
            self._unlock(node)

    def extend(self, node: Node, key: bytes, pages: list[int]) -> tuple[Node, list[int]]:
        """Continues the path at `node`, on which the caller has a lock, with computed pages.

        Returns the node where the path now ends, to which the caller's lock moves, and those of
        `pages` that the tree did not take because it has pages with the same tokens there.
        """
        held = node
        num_known = 0
        while num_known < len(pages):
            start = num_known * self._width
            child = node.children.get(key[start : start + self._width])
            if child is None:
                break
            count = child.common_pages(key, start, self._width)
            if count < len(child.pages):
                child = self._split(child, count)
            node = child
            num_known += count
        if num_known < len(pages):
            node = self._store(node, held, key[num_known * self._width :], pages[num_known:])
        self._lock_up_to(node, held)
        return node, pages[:num_known]

    def evict(self, count: int) -> list[int]:
        """Removes `count` unlocked pages, least recently used leaves first, tails first.

        Returns fewer when fewer are evictable. No step in flight reads them. O(log n) per node.
        """
        pages: list[int] = []
        hashes: list[int] = []
        while len(pages) < count and (node := self._pop_leaf()) is not None:
            keep = max(0, len(node.pages) - (count - len(pages)))
            pages += reversed(node.pages[keep:])
            hashes += reversed(node.hashes[keep:])
            if keep:
                del node.pages[keep:], node.hashes[keep:]
                node.key = node.key[: keep * self._width]
                self._push_leaf(node)
            else:
                self._detach(node)
        self.num_pages -= len(pages)
        self.num_evictable -= len(pages)
        if hashes:
            self._events.append(BlockRemoved(hashes))
        return pages

    def take_events(self) -> list[BlockEvent]:
        """What entered and left the tree since the last call, in that order."""
        events, self._events = self._events, []
        return events

    @property
    def has_events(self) -> bool:
        """Whether `take_events` would return any."""
        return bool(self._events)

    def nodes(self) -> Iterator[Node]:
        """All nodes, roots included, parents before children."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check_invariants(self, holders: list[Node]) -> None:
        """Asserts the tree's structure, and that exactly `holders` have locks that will stay."""
        expected: dict[int, int] = {}
        for holder in [*holders, *self._fence]:
            node: Node | None = holder
            while node is not None:
                expected[node.serial] = expected.get(node.serial, 0) + 1
                node = node.parent
        num_pages = num_evictable = num_nodes = 0
        candidates = {serial for _, serial, _ in self._leaves}
        for node in self.nodes():
            self._check_node(node)
            assert node.locks == expected.get(node.serial, 0), f"{node.locks} locks on a node"
            num_nodes += 1
            num_pages += len(node.pages)
            if not node.locks:
                num_evictable += len(node.pages)
                assert node.children or node.serial in candidates, "a leaf is lost to eviction"
        assert num_pages == self.num_pages, "pages of the tree miscounted"
        assert num_evictable == self.num_evictable, "evictable pages miscounted"
        assert num_nodes == self._num_nodes, "nodes of the tree miscounted"

    def _check_node(self, node: Node) -> None:
        if node.is_root:
            assert node.parent is None, "an inner node without pages"
            assert node.locks or node.children, "an empty root was kept"
        else:
            parent = node.parent
            assert parent is not None, "a node outside the tree is reachable"
            assert parent.children[node.key[: self._width]] is node, "a child under a wrong key"
            assert parent.locks >= node.locks, "locks must not grow downward"
            assert len(node.key) == len(node.pages) * self._width, "key and pages differ in length"
            assert len(node.hashes) == len(node.pages), "a page without its hash"
            assert node.hashes == block_hashes(node.key, self._page_size, parent.hashes[-1])

    def _root(self, cache_salt: str) -> Node:
        salt = cache_salt.encode()
        root = self._roots.get(salt)
        if root is None:
            start = root_hash(self._block_hash_salt, cache_salt)
            root = self._roots[salt] = self._new_node(None, salt, [], [start])
        return root

    def _new_node(
        self, parent: Node | None, key: bytes, pages: list[int], hashes: list[int]
    ) -> Node:
        self._num_nodes += 1
        self._serial += 1
        return Node(parent, key, pages, hashes, self._serial)

    def _store(self, node: Node, held: Node, key: bytes, pages: list[int]) -> Node:
        """Puts pages below `node`, where no child starts with them; returns where they lie."""
        hashes = block_hashes(key, self._page_size, node.hashes[-1])
        self._events.append(BlockStored(hashes[:], None if node.is_root else node.hashes[-1]))
        self.num_pages += len(pages)
        if node is held and node.locks == 1 and not node.children and not node.is_root:
            # Nobody else's path ends here: the run grows in place, and a long generation stays
            # one node.
            node.key += key
            node.pages += pages
            node.hashes += hashes
            return node
        child = self._new_node(node, key, list(pages), hashes)
        node.children[key[: self._width]] = child
        self.num_evictable += len(pages)
        return child

    def _split(self, node: Node, count: int) -> Node:
        """Cuts a node after `count` pages; returns the new upper part.

        The lower part remains the same object: paths that ended at its end still do.
        """
        parent = node.parent
        assert parent is not None
        cut = count * self._width
        upper = self._new_node(parent, node.key[:cut], node.pages[:count], node.hashes[:count])
        upper.locks = node.locks
        upper.last_use = node.last_use
        parent.children[upper.key[: self._width]] = upper
        node.key = node.key[cut:]
        del node.pages[:count], node.hashes[:count]
        upper.children[node.key[: self._width]] = node
        node.parent = upper
        return upper

    def _lock_up_to(self, node: Node | None, stop: Node | None) -> None:
        while node is not stop:
            assert node is not None, "the path does not lead through the node to stop at"
            if not node.locks:
                self.num_evictable -= len(node.pages)
            node.locks += 1
            node = node.parent

    def _unlock(self, node: Node) -> None:
        self._clock += 1
        above: Node | None = node
        while above is not None:
            assert above.locks > 0, "unlocked more often than locked"
            above.locks -= 1
            above.last_use = self._clock
            if not above.locks:
                self.num_evictable += len(above.pages)
            above = above.parent
        self._settle(node)

    def _settle(self, node: Node) -> None:
        """Lets go of a node that has become an unlocked leaf, or an empty root."""
        if node.locks or node.children:
            return
        if node.is_root:
            del self._roots[node.key]
            self._num_nodes -= 1
        else:
            self._push_leaf(node)

    def _push_leaf(self, node: Node) -> None:
        if len(self._leaves) > 2 * self._num_nodes + 64:
            self._leaves = [entry for entry in self._leaves if self._is_live(entry)]
            heapify(self._leaves)
        heappush(self._leaves, (node.last_use, node.serial, node))

    def _pop_leaf(self) -> Node | None:
        while self._leaves:
            entry = heappop(self._leaves)
            if self._is_live(entry):
                return entry[2]
        return None

    @staticmethod
    def _is_live(entry: tuple[int, int, Node]) -> bool:
        last_use, _, node = entry
        return (
            node.last_use == last_use
            and not node.locks
            and not node.children
            and node.parent is not None
        )

    def _detach(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key[: self._width]]
        node.parent = None
        self._num_nodes -= 1
        self._settle(parent)
