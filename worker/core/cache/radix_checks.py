"""Invariants of the radix tree's nodes, asserted in tests."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from worker.core.cache.node import Node
from worker.protocol.blocks import TOKEN_BYTES, block_hashes


def check_locks(nodes: Iterable[Node], holders: Iterable[Node]) -> None:
    """Asserts that exactly the paths to `holders` are locked."""
    expected: dict[int, int] = {}
    for holder in holders:
        node: Node | None = holder
        while node is not None:
            expected[node.serial] = expected.get(node.serial, 0) + 1
            node = node.parent
    for node in nodes:
        assert node.locks == expected.get(node.serial, 0), f"{node.locks} locks on a node"


def check_node(node: Node, page_size: int) -> None:
    """Asserts that a node is consistent with itself and its parent."""
    num_on_device = sum(not child.on_host for child in node.children.values())
    assert num_on_device == node.num_device_children, "children on the device miscounted"
    if node.is_root:
        assert node.parent is None, "an inner node without pages"
        assert node.locks or node.children, "an empty root was kept"
        return
    parent, width = node.parent, page_size * TOKEN_BYTES
    assert parent is not None, "a node outside the tree is reachable"
    assert parent.children[node.key[:width]] is node, "a child under a wrong key"
    assert parent.locks >= node.locks, "locks must not grow downward"
    # Sums of the same uses may differ in their last digits, since they are rounded differently
    # often.
    assert parent.rank > node.rank - 1e-3, "ranks must not grow downward"
    assert len(node.key) == len(node.pages) * width, "key and pages differ in length"
    assert len(node.hashes) == len(node.pages), "a page without its hash"
    assert node.hashes == _hashes(node.key, page_size, parent.hashes[-1])
    if node.on_host:
        assert not node.locks, "a run in host memory is locked"
        assert not node.num_device_children, "a run on the device below one in host memory"


@lru_cache(maxsize=4096)
def _hashes(key: bytes, page_size: int, parent: int) -> list[int]:
    """Cached `block_hashes`, for nodes that are checked often."""
    return block_hashes(key, page_size, parent)
