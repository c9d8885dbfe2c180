from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.wire.blocks import block_hashes, root_hash

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
        14310564245944559254,
        15293293408950177060,
    ]


def test_other_integer_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="int32"):
        block_hashes(np.zeros(4, np.int64), 2, 0)  # type: ignore[arg-type]
