from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.protocol.blocks import block_hash_array, block_hashes, cache_scope, root_hash

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=70)


@given(tokens=TOKENS, page_size=st.sampled_from([1, 4, 16]), cut=st.integers(0, 10))
def test_a_chain_can_be_extended_page_by_page(tokens: list[int], page_size: int, cut: int) -> None:
    data = array("i", tokens)
    root = root_hash("model", "salt")
    whole = block_hashes(data, page_size, root)
    assert len(whole) == len(tokens) // page_size
    assert all(0 <= value < 2**64 for value in whole)
    cut = min(cut, len(whole))
    parent = whole[cut - 1] if cut else root
    assert block_hashes(data[cut * page_size :], page_size, parent) == whole[cut:]


@given(tokens=TOKENS)
def test_every_kind_of_buffer_hashes_alike(tokens: list[int]) -> None:
    numbers = np.asarray(tokens, np.int32)
    expected = block_hashes(numbers.tobytes(), 4, 1)
    for buffer in (numbers, array("i", tokens), memoryview(numbers), bytearray(numbers)):
        assert block_hashes(buffer, 4, 1) == expected


def test_a_block_depends_on_all_tokens_before_it() -> None:
    tokens = list(range(12))
    before = block_hashes(array("i", tokens), 4, 0)
    tokens[0] = 99
    after = block_hashes(array("i", tokens), 4, 0)
    assert all(one != other for one, other in zip(before, after, strict=True))


def test_salts_separate_chains() -> None:
    roots = [root_hash("m", "a"), root_hash("ma", ""), root_hash("m", ""), root_hash("", "ma")]
    assert len(set(roots)) == len(roots)


def test_hashes_never_change_between_versions() -> None:
    # Gateways and workers of different builds must agree.
    assert root_hash("model", "salt") == 9634075474973202266
    assert block_hashes(array("i", [1, 2, 3, 4]), 2, root_hash("model", "salt")) == [
        2617165949570729498,
        84318370353976166,
    ]


def test_other_integer_widths_are_rejected() -> None:
    with pytest.raises(ValueError, match="int32"):
        block_hashes(np.zeros(4, np.int64), 2, 0)  # type: ignore[arg-type]


@given(tokens=st.lists(st.integers(0, 2**31 - 1), max_size=400), page_size=st.sampled_from([4, 16]))
def test_arrays_and_plain_integers_agree(tokens: list[int], page_size: int) -> None:
    data = array("i", tokens)
    parent, chain = 12345, []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        [parent] = block_hashes(data[start : start + page_size], page_size, parent)
        chain.append(parent)
    assert block_hash_array(data, page_size, 12345).tolist() == chain
    assert block_hashes(data, page_size, 12345) == chain


def test_a_page_depends_on_every_token_and_its_place() -> None:
    random = np.random.default_rng(0)
    pages = random.integers(0, 50_000, (2000, 16), dtype=np.int32)
    pages[1000:] = pages[:1000]
    for row, page in enumerate(pages[1000:]):  # one token incremented, or two swapped
        place = row % 15
        if row % 2:
            page[place] += 1
        else:
            page[place], page[place + 1] = page[place + 1] + 1, page[place]
    hashes = {block_hash_array(page.copy(), 16, 7).item(0) for page in pages}
    assert len(hashes) == len(pages)
    bits = np.array(sorted(hashes), np.uint64)
    for place in range(64):  # all bits matter for hash tables
        share = float(((bits >> np.uint64(place)) & np.uint64(1)).mean())
        assert 0.45 < share < 0.55


@given(st.lists(st.tuples(st.text("\0.12ab", max_size=4), *[st.text(".12ab", max_size=3)] * 2)))
def test_scopes_differ_where_anything_differs(triples: list[tuple[str, str, str]]) -> None:
    scopes = {cache_scope(*triple) for triple in triples}
    assert len(scopes) == len(set(triples))
    assert cache_scope("salt") == "salt"  # without tenants and adapters
