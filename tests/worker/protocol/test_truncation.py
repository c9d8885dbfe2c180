"""Truncated texts and pairs have the tokens and types that transformers gives them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.effort import cases
from tests.support.pair_tokenizer import KINDS, SEP, build_pair_tokenizer
from worker.protocol.text.tokenizer import Tokenizer
from worker.protocol.text.truncation import Side, Truncation

OURS = {kind: Tokenizer(build_pair_tokenizer(kind)) for kind in KINDS}
TEXTS = st.lists(st.sampled_from([*"abcdefgh", "[SEP]"]), max_size=9).map(" ".join)


@pytest.fixture(scope="module")
def theirs() -> dict[tuple[str, str], Any]:
    """Tokenizers of transformers by kind and side of truncation."""
    from transformers import PreTrainedTokenizerFast  # a second, of `make unit`, too

    return {
        (kind, side): PreTrainedTokenizerFast(
            tokenizer_object=build_pair_tokenizer(kind),
            truncation_side=side,
            model_input_names=["input_ids", "token_type_ids"],
        )
        for kind in KINDS
        for side in ("left", "right")
    }


@settings(max_examples=cases(300), deadline=None)
@given(
    kind=st.sampled_from(list(KINDS)),
    texts=TEXTS | st.tuples(TEXTS, TEXTS.filter(bool)),  # transformers ignores an empty second text
    maximum=st.none() | st.integers(5, 24),
    side=st.sampled_from(["left", "right"]),
)
def test_tokens_are_those_of_transformers(
    theirs: dict[tuple[str, str], Any],
    kind: str,
    texts: str | tuple[str, str],
    maximum: int | None,
    side: Side,
) -> None:
    truncation = None if maximum is None else Truncation(maximum, side)
    found = OURS[kind].encode_texts(texts, truncation=truncation)
    pair = (texts,) if isinstance(texts, str) else texts
    expected = theirs[kind, side](*pair, truncation=maximum is not None, max_length=maximum)
    assert found.token_ids == expected["input_ids"]
    types = expected["token_type_ids"]
    assert found.second_text == (types.index(1) if 1 in types else 0)


def test_a_separator_in_a_text_does_not_end_it() -> None:
    found = OURS["bert"].encode_texts(("a [SEP] b", "c"))
    assert found.token_ids[found.second_text - 1] == SEP
    assert found.second_text == 5


def test_no_room_for_text() -> None:
    with pytest.raises(ValueError, match=r"3 special tokens.*at least 4"):
        OURS["bert"].encode_texts(("a", "b"), truncation=Truncation(3))


def test_token_ids_are_cut_as_they_are() -> None:
    assert [5, 6, 7][Truncation(2).cut] == [5, 6]
    assert [5, 6, 7][Truncation(2, "left").cut] == [6, 7]
    assert [5, 6, 7][Truncation(8, "left").cut] == [5, 6, 7]
