"""Prefix cache: a path-compressed radix tree of full pages; shared prefixes are evicted last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from worker.core.cache.fence import CompletedSteps, Fence
from worker.core.cache.host import HostTier
from worker.core.cache.lease import Match
from worker.core.cache.leaves import Leaves
from worker.core.cache.node import Node
from worker.core.cache.radix_checks import check_locks, check_node
from worker.protocol.blocks import TOKEN_BYTES, block_hashes, root_hash
from worker.protocol.messages import BlockEvent, BlockRemoved, BlockStored


class RadixTree:
    """Owns cached pages, which leases may read; tokens are compared exactly.

    A lock on a node protects it and all its ancestors; everything else can be evicted, leaves
    first. Every lock is released by `unlock`, given the last step that reads the pages.

    With a host tier, evicted pages move there and stay in the tree, as runs in host memory below
    those on the device, until they are loaded, recomputed, or evicted from host memory, too.

    Leaves are evicted by LRFU (`Node.touch`): least recently used first, but prefixes shared by
    several requests stay longer. A request that branches off a cached path counts as a use of all
    nodes up to that point. A request that extends the end of a path does not: earlier turns of a
    conversation do not predict another turn.

    Args:
        page_size: tokens per page.
        block_hash_salt: mixed into block hashes.
        capacity: number of pages on the device. The weight of a use decays to 1/e in the time in
            which this many pages are added to the tree, which is also how long a page that is used
            once stays cached.
        steps: the completed steps.
        host: host-memory tier; None if disabled.
    """

    def __init__(
        self,
        page_size: int,
        block_hash_salt: str,
        capacity: int,
        steps: CompletedSteps,
        host: HostTier | None = None,
    ) -> None:
        self.num_evictable = 0
        """Number of device pages that are not locked."""
        self._page_size = page_size
        self._width = page_size * TOKEN_BYTES
        self._block_hash_salt = block_hash_salt
        self._window = float(capacity)
        self._roots: dict[bytes, Node] = {}
        self._fence = Fence(steps, self._unlock)
        self._clock = 0
        """Number of pages stored and locks released so far."""
        self._num_nodes = 0
        self._serial = 0
        self._host = host
        self._leaves = Leaves(_can_leave_device)
        self._host_leaves = Leaves(_can_leave_host)
        self.events: list[BlockEvent] = []
        """Blocks that entered or left the tree, in the order of these events; the owner clears
        them."""

    @property
    def num_fenced(self) -> int:
        """Number of locks waiting for a step in flight."""
        return len(self._fence)

    def match(self, key: bytes, max_pages: int, cache_salt: str) -> Match:
        """Finds the longest cached prefix of `key`, up to `max_pages` pages. Locks nothing."""
        node = self._roots.get(cache_salt.encode())
        if node is None:
            return Match(None, [], 0)
        key = key[: max_pages * self._width]
        pages: list[int] = []
        num_unlocked = num_host = loading = 0
        device_node: Node | None = None
        while (num_pages := len(pages) + num_host) < max_pages:
            child = self._child_along(node, key, num_pages)
            if child is None:
                break
            node = child
            if child.on_host:
                num_host += len(child.pages)
                continue
            device_node = child
            pages += child.pages
            loading = max(loading, child.loading)
            if not child.locks:
                num_unlocked += len(child.pages)
        host_node = node if num_host else None
        return Match(device_node, pages, num_unlocked, host_node, num_host, loading=loading)

    def lock(self, node: Node | None, cache_salt: str) -> Node:
        """Protects the path to `node` (the root of `cache_salt` if None) from eviction."""
        if node is None:
            node = self._root(cache_salt)
        self._lock_up_to(node, None)
        return node

    def num_held_alone(self, node: Node) -> int:
        """Number of pages on the path to a locked node that no other lock protects."""
        count = 0
        above: Node | None = node
        while above is not None and above.locks == 1:
            count += len(above.pages)
            above = above.parent
        return count

    def unlock(self, node: Node, fence: int) -> None:
        """Releases a lock once step `fence`, the last one that reads the path, has completed."""
        if self._fence.passed(fence):
            self._unlock(node)
        else:
            self._fence.hold(node, fence)

    def insert(self, node: Node, key: bytes, pages: list[int]) -> tuple[Node, list[int]]:
        """Extends the path that ends at `node` by computed pages. The caller must have locked
        `node`.

        Pages whose tokens are already in the tree on the device are not added. Pages whose tokens
        are only in host memory replace the host slots.

        Returns:
            The node at the new end of the path, to which the caller's lock moves, and the pages
            that were not added (duplicates, at the start of `pages`).
        """
        locked = node
        num_known = num_duplicates = 0
        while num_known < len(pages):
            child = self._child_along(node, key, num_known)
            if child is None:
                break
            node, count = child, len(child.pages)
            if node.on_host:
                computed = pages[num_known : num_known + count]
                assert self._host is not None
                self._host.supersede(self._promote(node, computed), computed)
            else:
                num_duplicates += count
            num_known += count
        if num_known < len(pages):
            node = self._store(node, locked, key[num_known * self._width :], pages[num_known:])
        self._lock_up_to(node, locked)
        return node, pages[:num_duplicates]

    def last_pages(self, node: Node, count: int) -> list[int]:
        """Last `count` pages of the path that ends at `node`, in order."""
        pages: list[int] = []
        above: Node | None = node
        while len(pages) < count:
            assert above is not None, "the path has fewer pages"
            pages[:0] = above.pages
            above = above.parent
        return pages[len(pages) - count :]

    def load(self, node: Node, pages: list[int], seq: int) -> None:
        """Schedules loads into `pages` with Plan `seq`, for the part of the locked path to `node`
        that is in host memory."""
        assert self._host is not None
        runs: list[Node] = []
        above: Node | None = node
        while above is not None and above.on_host:
            runs.append(above)
            above = above.parent
        start = 0
        for run in reversed(runs):
            end = start + len(run.pages)
            loaded = pages[start:end]
            self._host.load(self._promote(run, loaded), loaded)
            run.loading = seq
            start = end
        assert start == len(pages), "as many pages as there are in host memory"

    def evict(self, count: int) -> list[int]:
        """Evicts `count` unlocked device pages from the tails of leaves, lowest rank first.

        Pages are stored in host memory if there is room. Returns the evicted pages, which may be
        fewer than `count`; no step in flight reads them. O(log n) per node.
        """
        pages: list[int] = []
        hashes: list[int] = []
        while len(pages) < count and (node := self._leaves.pop()) is not None:
            keep = max(0, len(node.pages) - (count - len(pages)))
            if keep:
                node = self._split_tail(node, keep)
            pages += reversed(node.pages)
            hashes += reversed(node.hashes)
            self._leave_device(node)
        if hashes:
            self.events.append(BlockRemoved(hashes))
        return pages

    def nodes(self) -> Iterator[Node]:
        """All nodes including roots, parents before children."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check_invariants(self, holders: list[Node]) -> None:
        """Asserts that the tree is well-formed, and that its locks are exactly those on the nodes
        `holders` and those waiting for a step in flight."""
        nodes = list(self.nodes())
        check_locks(nodes, [*holders, *self._fence])
        on_device, on_host = set(self._leaves.serials()), set(self._host_leaves.serials())
        for node in nodes:
            check_node(node, self._page_size)
            if node.locks or node.is_root:
                continue
            candidates = on_host if node.on_host else on_device
            below = len(node.children) if node.on_host else node.num_device_children
            assert below or node.serial in candidates, "a leaf is lost to eviction"
        device = [node for node in nodes if not node.on_host]
        evictable = sum(len(node.pages) for node in device if not node.locks)
        assert evictable == self.num_evictable, "evictable pages miscounted"
        assert len(nodes) == self._num_nodes, "nodes of the tree miscounted"

    def _root(self, cache_salt: str) -> Node:
        salt = cache_salt.encode()
        root = self._roots.get(salt)
        if root is None:
            start = root_hash(self._block_hash_salt, cache_salt)
            root = self._roots[salt] = Node(None, salt, [], [start], self._next_serial())
        return root

    def _next_serial(self) -> int:
        """Counts a new node and returns its serial number."""
        self._num_nodes += 1
        self._serial += 1
        return self._serial

    def _child_along(self, node: Node, key: bytes, num_pages: int) -> Node | None:
        """Child of `node` that continues `key` after `num_pages` pages, split where its key
        diverges; None if there is none."""
        start = num_pages * self._width
        child = node.children.get(key[start : start + self._width])
        if child is None:
            return None
        count = child.common_pages(key, start, self._width)
        if count == len(child.pages):
            return child
        return child.cut_head(count, self._width, self._next_serial())

    def _store(self, node: Node, locked: Node, key: bytes, pages: list[int]) -> Node:
        """Adds pages below `node`, none of whose children starts with the same page; returns the
        node that contains them."""
        self._clock += len(pages)
        hashes = block_hashes(key, self._page_size, node.hashes[-1])
        self.events.append(BlockStored(hashes[:], _chain_before(node)))
        if node is locked and node.locks == 1 and not node.children and not node.is_root:
            # No other path ends here: the run grows in place, so that a long generation stays one
            # node.
            node.key += key
            node.pages += pages
            node.hashes += hashes
            return node
        if node.children:
            self._touch_up_to_root(node, num_uses=1)
        child = Node(node, key, list(pages), hashes, self._next_serial())
        node.children[key[: self._width]] = child
        node.num_device_children += 1
        self.num_evictable += len(pages)
        return child

    def _split_tail(self, node: Node, count: int) -> Node:
        """Splits an unlocked node after `count` pages; returns the new lower part."""
        return node.cut_tail(count, self._width, self._next_serial())

    def _lock_up_to(self, node: Node | None, stop: Node | None) -> None:
        while node is not stop:
            assert node is not None, "the path does not lead through the node to stop at"
            if not node.locks and not node.on_host:
                self.num_evictable -= len(node.pages)
            node.locks += 1
            node = node.parent

    def _unlock(self, node: Node) -> None:
        self._clock += 1
        self._touch_up_to_root(node, num_uses=0)
        above: Node | None = node
        while above is not None:
            assert above.locks > 0, "unlocked more often than locked"
            above.locks -= 1
            if not above.locks:
                self.num_evictable += len(above.pages)
            above = above.parent
        self._push_leaf(node)

    def _touch_up_to_root(self, node: Node, num_uses: int) -> None:
        above: Node | None = node
        while above is not None:
            above.touch(self._clock, num_uses, self._window)
            above = above.parent

    def _push_leaf(self, node: Node) -> None:
        """Makes an unlocked leaf a candidate for eviction, or drops a root without children."""
        if node.locks:
            return
        if node.is_root:
            if not node.children:
                del self._roots[node.key]
                self._num_nodes -= 1
        elif node.on_host:
            if not node.children:
                self._host_leaves.push(node, self._num_nodes)
        elif not node.num_device_children:
            self._leaves.push(node, self._num_nodes)

    def _leave_device(self, node: Node) -> None:
        """Moves as many leading pages of a node to the host as there is room for; drops
        the rest."""
        num_stored = self._make_room(node.pages)
        if num_stored < len(node.pages):
            tail = self._split_tail(node, num_stored) if num_stored else node
            self._drop_below(tail)
            self.num_evictable -= len(tail.pages)
            self._detach(tail)
        if num_stored:
            self._demote(node)

    def _make_room(self, pages: Sequence[int]) -> int:
        """Evicts pages from the host to make room for `pages`; returns how many fit."""
        host = self._host
        if host is None:
            return 0
        while (count := host.num_missing(pages)) > 0:
            leaf = self._host_leaves.pop()
            if leaf is None:
                break
            if not host.is_idle(leaf.pages):
                # Neither this leaf nor any more recently used one can be freed now.
                self._host_leaves.push(leaf, self._num_nodes)
                break
            keep = host.num_kept(leaf.pages, count)
            self._drop(self._split_tail(leaf, keep) if keep else leaf)
        return host.num_fitting(pages)

    def _demote(self, node: Node) -> None:
        """Moves an unlocked run that has no children on the device to the host."""
        assert self._host is not None
        parent = node.parent
        assert parent is not None
        assert not node.locks
        assert not node.num_device_children
        self.events.append(BlockStored(node.hashes[:], _chain_before(parent), "host"))
        self.num_evictable -= len(node.pages)
        node.pages = self._host.store(node.pages)
        node.on_host = True
        parent.num_device_children -= 1
        if len(node.children) == 1:
            # Pages are evicted one by one, from the tail: merge what was a single run.
            node.absorb(*node.children.values())
            self._num_nodes -= 1
        self._push_leaf(node)
        self._push_leaf(parent)

    def _promote(self, node: Node, pages: list[int]) -> list[int]:
        """Changes a node in host memory, whose parent must be on the device, to refer to the
        device pages `pages`; returns the host slots that it occupied."""
        parent = node.parent
        assert parent is not None
        assert not parent.on_host
        assert len(pages) == len(node.pages)
        slots, node.pages = node.pages, list(pages)
        node.on_host = False
        parent.num_device_children += 1
        if not node.locks:
            self.num_evictable += len(pages)
        self.events.append(BlockStored(node.hashes[:], _chain_before(parent)))
        self.events.append(BlockRemoved(node.hashes[::-1], "host"))
        return slots

    def _drop_below(self, node: Node) -> None:
        """Drops all nodes below a node on the device; the dropped nodes must be in host memory."""
        below: list[Node] = []
        stack = list(node.children.values())
        while stack:
            below.append(stack.pop())
            stack.extend(below[-1].children.values())
        for child in reversed(below):
            self._drop(child)

    def _drop(self, node: Node) -> None:
        """Drops a leaf in host memory from the tree."""
        assert self._host is not None
        self._host.forget(node.pages)
        self.events.append(BlockRemoved(node.hashes[::-1], "host"))
        self._detach(node)

    def _detach(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        assert not node.children
        del parent.children[node.key[: self._width]]
        parent.num_device_children -= not node.on_host
        node.parent = None
        self._num_nodes -= 1
        self._push_leaf(parent)


def _chain_before(parent: Node) -> int | None:
    """Hash of the block that precedes the blocks of a node's children; None at the start of a
    chain."""
    return None if parent.is_root else parent.hashes[-1]


def _can_leave_device(node: Node) -> bool:
    return not node.locks and not node.on_host and not node.num_device_children


def _can_leave_host(node: Node) -> bool:
    return not node.locks and node.on_host and not node.children
