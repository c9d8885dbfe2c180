from __future__ import annotations

from array import array

from worker.core.cache.fence import CompletedSteps
from worker.core.cache.node import Node
from worker.core.cache.radix import RadixTree
from worker.protocol.blocks import block_hashes, root_hash
from worker.protocol.messages import BlockRemoved, BlockStored

SIZE = 2
CAPACITY = 10


def key(text: str) -> bytes:
    """Two letters are one page."""
    return array("i", [ord(letter) for letter in text]).tobytes()


def hashes(text: str, salt: str = "") -> list[int]:
    return block_hashes(key(text), SIZE, root_hash("m", salt))


def store(tree: RadixTree, text: str, pages: list[int], salt: str = "") -> Node:
    """Stores text as a request does: matched part locked, the rest added; still locked."""
    match = tree.match(key(text), len(pages), salt)
    known = len(match.pages)
    node = tree.lock(match.node, salt)
    node, duplicates = tree.insert(node, key(text[known * SIZE :]), pages[known:])
    assert not duplicates
    return node


def cached(tree: RadixTree, text: str, salt: str = "") -> list[int]:
    return tree.match(key(text), len(text) // SIZE, salt).pages


def test_match_finds_the_longest_prefix_by_its_tokens() -> None:
    tree = RadixTree(SIZE, "m", CAPACITY, CompletedSteps())
    store(tree, "aabbcc", [1, 2, 3])
    assert cached(tree, "aabbccdd") == [1, 2, 3]
    assert cached(tree, "aabbxx") == [1, 2]
    assert cached(tree, "xxaabb") == []
    assert tree.match(key("aabbcc"), 2, "").pages == [1, 2]
    assert cached(tree, "aabbcc", salt="other") == []


def test_paths_share_their_common_part() -> None:
    tree = RadixTree(SIZE, "m", CAPACITY, CompletedSteps())
    first = store(tree, "aabbcc", [1, 2, 3])
    second = store(tree, "aabbdd", [1, 2, 4])
    assert cached(tree, "aabbdd") == [1, 2, 4]
    assert first.parent is second.parent
    tree.check_invariants([first, second])


def test_a_long_generation_stays_one_node() -> None:
    tree = RadixTree(SIZE, "m", CAPACITY, CompletedSteps())
    node = store(tree, "aa", [1])
    for page in range(2, 50):
        node, _ = tree.insert(node, key("bb"), [page])
    assert len(list(tree.nodes())) == 2
    tree.check_invariants([node])


def test_two_leases_at_one_node_do_not_extend_each_other() -> None:
    tree = RadixTree(SIZE, "m", CAPACITY, CompletedSteps())
    first = store(tree, "aa", [1])
    second = tree.lock(tree.match(key("aa"), 1, "").node, "")
    first, _ = tree.insert(first, key("bb"), [2])
    second, duplicates = tree.insert(second, key("bbcc"), [3, 4])
    assert duplicates == [3]
    assert cached(tree, "aabbcc") == [1, 2, 4]
    tree.check_invariants([first, second])


def test_already_cached_pages_are_returned() -> None:
    tree = RadixTree(SIZE, "m", CAPACITY, CompletedSteps())
    store(tree, "aabbcc", [1, 2, 3])
    node = tree.lock(None, "")
    _, duplicates = tree.insert(node, key("aabbdd"), [4, 5, 6])
    assert duplicates == [4, 5]
    assert cached(tree, "aabbdd") == [1, 2, 6]


def test_eviction_takes_the_least_recently_used_leaf_from_its_tail() -> None:
    tree = RadixTree(SIZE, "m", CAPACITY, CompletedSteps())
    old = store(tree, "aabbcc", [1, 2, 3])
    new = store(tree, "aaddee", [1, 4, 5])
    tree.unlock(old, 0)
    tree.unlock(new, 0)
    assert tree.evict(1) == [3]
    assert cached(tree, "aabbcc") == [1, 2]  # only looked at: not a use
    assert tree.evict(2) == [2, 5]
    assert tree.evict(9) == [4, 1]
    assert tree.evict(1) == []
    tree.check_invariants([])
    assert list(tree.nodes()) == []


def test_a_shared_prefix_is_kept_longer_than_later_unshared_ones() -> None:
    tree = RadixTree(SIZE, "m", CAPACITY, CompletedSteps())
    for text, page in (("aabb", 2), ("aacc", 3)):
        tree.unlock(store(tree, text, [1, page]), 0)
    tree.unlock(store(tree, "xx", [4]), 0)
    assert tree.evict(3) == [2, 3, 4]
    assert cached(tree, "aa") == [1]


def test_an_unused_shared_prefix_is_evicted_eventually() -> None:
    tree = RadixTree(SIZE, "m", CAPACITY, CompletedSteps())
    for text, page in (("aabb", 2), ("aacc", 3)):
        tree.unlock(store(tree, text, [1, page]), 0)
    assert tree.evict(2) == [2, 3]
    for page, letter in enumerate("pqrstuvwxy", start=4):
        tree.unlock(store(tree, 2 * letter, [page]), 0)
    assert tree.evict(4) == [4, 5, 1, 6]


def test_turns_of_a_conversation_are_evicted_least_recently_used_first() -> None:
    tree = RadixTree(SIZE, "m", CAPACITY, CompletedSteps())
    for length in range(1, 5):
        tree.unlock(store(tree, "aabbccdd"[: length * SIZE], list(range(1, 1 + length))), 0)
    tree.unlock(store(tree, "xx", [5]), 0)
    assert tree.evict(4) == [4, 3, 2, 1]


def test_locked_paths_are_not_evicted() -> None:
    tree = RadixTree(SIZE, "m", CAPACITY, CompletedSteps())
    kept = store(tree, "aabb", [1, 2])
    gone = store(tree, "aacc", [1, 3])
    tree.unlock(gone, 0)
    assert sum(len(node.pages) for node in tree.nodes()) == 3
    assert tree.num_evictable == 1
    assert tree.evict(5) == [3]
    tree.check_invariants([kept])


def test_a_lock_ends_after_its_fence() -> None:
    steps = CompletedSteps()
    tree = RadixTree(SIZE, "m", CAPACITY, steps)
    node = store(tree, "aabb", [1, 2])
    steps.complete(1)
    tree.unlock(node, 2)
    assert (tree.num_fenced, tree.evict(1)) == (1, [])
    steps.complete(2)
    assert tree.evict(2) == [2, 1]


def test_a_match_counts_unlocked_pages() -> None:
    tree = RadixTree(SIZE, "m", CAPACITY, CompletedSteps())
    short = store(tree, "aa", [1])
    long = store(tree, "aabbcc", [1, 2, 3])
    tree.unlock(long, 0)
    assert tree.match(key("aabbcc"), 3, "").num_unlocked == 2
    tree.check_invariants([short])


def test_events_are_in_chain_order() -> None:
    tree = RadixTree(SIZE, "m", CAPACITY, CompletedSteps())
    node = store(tree, "aabb", [1, 2])
    node, _ = tree.insert(node, key("cc"), [3])
    chain = hashes("aabbcc")
    assert tree.events == [BlockStored(chain[:2], None), BlockStored(chain[2:], chain[1])]
    tree.events.clear()
    tree.unlock(node, 0)
    tree.evict(2)
    assert tree.events == [BlockRemoved([chain[2], chain[1]])]


def test_events_do_not_change_after_creation() -> None:
    tree = RadixTree(SIZE, "m", CAPACITY, CompletedSteps())
    node = store(tree, "aa", [1])
    tree.insert(node, key("bb"), [2])
    assert tree.events[0] == BlockStored(hashes("aa"), None)


def test_salts_share_nothing() -> None:
    tree = RadixTree(SIZE, "m", CAPACITY, CompletedSteps())
    store(tree, "aa", [1], salt="x")
    store(tree, "aa", [2], salt="y")
    assert cached(tree, "aa", salt="x") == [1]
    assert cached(tree, "aa", salt="y") == [2]
    assert hashes("aa", "x") != hashes("aa", "y")


def test_candidates_for_eviction_do_not_pile_up() -> None:
    tree = RadixTree(SIZE, "m", CAPACITY, CompletedSteps())
    tree.unlock(store(tree, "aa", [1]), 0)
    for _ in range(1000):
        tree.unlock(tree.lock(tree.match(key("aa"), 1, "").node, ""), 0)
    assert len(tree._leaves) < 100
    tree.check_invariants([])
    assert tree.evict(1) == [1]
