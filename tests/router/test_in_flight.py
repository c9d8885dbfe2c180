from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from router.fleet import PromptBlocks
from router.fleet.in_flight import InFlight
from router.fleet.memo import HashMemo
from tests.support.effort import cases
from worker.protocol.adapters import AdapterRef
from worker.protocol.blocks import BlockHashes, block_hash_array, root_hash

PROMPT = st.lists(st.integers(0, 1), min_size=0, max_size=9)


def chain(prompt: list[int]) -> BlockHashes:
    return block_hash_array(np.array(prompt, np.int32), 1, 1)


@given(data=st.data())
@settings(max_examples=cases(150), deadline=None)
def test_tree_equals_a_list_of_prompts(data: st.DataObject) -> None:
    tree = InFlight()
    flights: list[tuple[list[int], int, object]] = []
    for _ in range(data.draw(st.integers(0, 25))):
        if flights and data.draw(st.booleans()):
            _, row, flight = flights.pop(data.draw(st.integers(0, len(flights) - 1)))
            tree.remove(flight, row)  # type: ignore[arg-type]
        else:
            prompt, row = data.draw(PROMPT), data.draw(st.integers(0, 3))
            flights.append((prompt, row, tree.add(chain(prompt), row)))
    query = data.draw(PROMPT)
    found = tree.match(chain(query))
    assert len(tree) == len(flights)
    shared = [
        (next((i for i, (a, b) in enumerate(zip(p, query, strict=False)) if a != b),
              min(len(p), len(query))), row)
        for p, row, _ in flights
    ]  # fmt: skip
    lengths = [length for _, length in found]
    assert lengths == sorted(set(lengths))
    for row in range(4):
        expected = max((length for length, r in shared if r == row), default=0)
        assert max((length for rows, length in found if rows >> row & 1), default=0) == expected
    for rows, length in found:
        assert rows == sum({1 << row for bit, row in shared if bit >= length})


def test_memo_gives_the_same_hashes_for_whatever_it_has_seen() -> None:
    random = np.random.default_rng(0)
    memo = HashMemo(max_segments=40)
    text = random.integers(0, 1000, 40_000).astype("<i4")
    other = text.copy()
    other[17_000] += 1
    for tokens in (text[:9_000], text, text[:20_000], other, text, text[:4096], text[:10]):
        for page_size, salt in ((16, "a"), (4, "a"), (16, "b")):
            root = root_hash(salt)
            expected = block_hash_array(tokens, page_size, root)
            assert (memo.hashes(tokens.tobytes(), page_size, root) == expected).all()
            assert len(memo._segments) <= 40


def test_prompts_are_separated_by_all_that_separates_caches() -> None:
    data = np.arange(64, dtype="<i4").tobytes()
    memo = HashMemo()
    prompts = [
        PromptBlocks(data, memo=memo),
        PromptBlocks(data, "s", memo=memo),
        PromptBlocks(data, adapter=AdapterRef("n", "/a", "s"), memo=memo),
        PromptBlocks(data, adapter=AdapterRef("n", "/a", "another version"), memo=memo),
        PromptBlocks(data, tenant="s", memo=memo),
        PromptBlocks(data, tenant="s", adapter=AdapterRef("n", "/a", "s"), memo=memo),
    ]
    from router.fleet import BlockKey

    keys = (BlockKey(4, "m"), BlockKey(4, "n"))
    firsts = {prompt.hashes(key).item(0) for prompt in prompts for key in keys}
    assert len(firsts) == 12
