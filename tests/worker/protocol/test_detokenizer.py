from __future__ import annotations

import itertools
import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from tests.support.effort import cases
from worker.protocol.text.detokenizer import Detokenizer, RequestText, StreamDetokenizer
from worker.protocol.text.stop import StopChecker, StopStrings
from worker.protocol.text.tokenizer import Tokenizer

SMALL_TEXT = st.text(alphabet="abc✓", max_size=60)
STOPS = st.lists(st.text(alphabet="abc✓", min_size=1, max_size=5), min_size=1, max_size=4)


def pieces_of(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [*(detokenizer.push([token_id]) for token_id in token_ids), detokenizer.flush()]


def naive_stop(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def cut(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(min(c, len(text)) for c in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@given(data=st.data())
@settings(max_examples=cases(150), deadline=None)
def test_any_byte_level_sequence_equals_the_whole_decode(
    byte_level: Backend, data: st.DataObject
) -> None:
    size = byte_level.get_vocab_size(with_added_tokens=True)
    token_ids = data.draw(st.lists(st.integers(0, size + 5), max_size=40))
    skip = data.draw(st.booleans())
    tokenizer = Tokenizer(byte_level)
    joined = "".join(pieces_of(tokenizer.detokenizer(skip_special_tokens=skip), token_ids))
    assert joined == tokenizer.decode(token_ids, skip_special_tokens=skip)


def test_no_piece_ends_within_a_character(byte_level: Backend) -> None:
    text = "ein 🙂 und 👩‍👩‍👧 und Ω∑"
    tokenizer = Tokenizer(byte_level)
    token_ids = tokenizer.encode(text)
    pieces = pieces_of(tokenizer.detokenizer(), token_ids)
    assert len(token_ids) > len(text.split())
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text


def test_unfinished_character_shows_at_the_end_only(byte_level: Backend) -> None:
    tokenizer = Tokenizer(byte_level)
    token_ids = tokenizer.encode("x🦄")[:-1]
    pieces = pieces_of(tokenizer.detokenizer(), token_ids)
    assert not any("\ufffd" in piece for piece in pieces[:-1])
    assert pieces[-1] == "\ufffd"


def test_sentencepiece_keeps_spaces_and_joins_byte_tokens(sentencepiece: Backend) -> None:
    tokenizer = Tokenizer(sentencepiece)
    ids = [tokenizer.token_id(t) for t in ["<s>", "▁hello", "▁world", "<0xF0>", "<0x9F>"]]
    ids += [tokenizer.token_id(t) for t in ["<0x99>", "<0x82>", "▁gar", "ç", "on", ".", "</s>"]]
    token_ids = [token_id for token_id in ids if token_id is not None]
    detokenizer = tokenizer.detokenizer()
    assert isinstance(detokenizer, StreamDetokenizer)
    pieces = pieces_of(detokenizer, token_ids)
    assert "".join(pieces) == "hello world🙂 garçon." == tokenizer.decode(token_ids)
    assert not any("\ufffd" in piece for piece in pieces)


def test_sentencepiece_flushes_an_unfinished_character(sentencepiece: Backend) -> None:
    tokenizer = Tokenizer(sentencepiece)
    token_ids = [tokenizer.token_id("▁hello"), tokenizer.token_id("<0xF0>")]
    pieces = pieces_of(tokenizer.detokenizer(), [t for t in token_ids if t is not None])
    assert pieces == ["hello", "", "\ufffd"]


def test_bytes_that_never_make_text_are_not_held_forever(sentencepiece: Backend) -> None:
    tokenizer = Tokenizer(sentencepiece)
    bad = tokenizer.token_id("<0xFF>")
    assert bad is not None
    detokenizer = tokenizer.detokenizer()
    shown = "".join(detokenizer.push([bad]) for _ in range(100))
    assert len(shown) > 80
    assert len(shown + detokenizer.flush()) == 100


@given(text=SMALL_TEXT, cuts=st.lists(st.integers(0, 60)), stops=STOPS, include=st.booleans())
@settings(max_examples=cases(250), deadline=None)
def test_stop_strings_equal_the_naive_answer_however_the_text_is_cut(
    text: str, cuts: list[int], stops: list[str], include: bool
) -> None:
    checker = StopChecker(StopStrings(stops), include_stop_str_in_output=include)
    shown = "".join(checker.push(piece) for piece in cut(text, cuts))
    if checker.matched is None:
        shown += checker.flush()
    assert (shown, checker.matched) == naive_stop(text, stops, include)


@given(text=SMALL_TEXT, cuts=st.lists(st.integers(0, 60)), stops=STOPS)
@settings(max_examples=cases(150), deadline=None)
def test_only_a_possible_beginning_is_held_back(
    text: str, cuts: list[int], stops: list[str]
) -> None:
    checker = StopChecker(StopStrings(stops))
    seen = shown = ""
    for piece in cut(text, cuts):
        seen += piece
        shown += checker.push(piece)
        if checker.matched is not None:
            return
        held = seen[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)
        assert shown + held == seen


@pytest.mark.parametrize("text", ["z" * 2000, "abcdefgh" * 250, "a" * 2000, "a" * 62 + "b" * 1938])
def test_a_character_costs_the_same_with_many_stop_strings(text: str) -> None:
    """Lines of Python, not seconds."""
    stops = StopStrings(["a" * 63 + chr(200 + number) for number in range(128)])
    checker, lines = StopChecker(stops), 0

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        for character in text:
            checker.push(character)
    finally:
        sys.settrace(before)
    assert lines < 30 * len(text)


def test_tokens_after_a_stop_string_are_not_taken(byte_level: Backend) -> None:
    tokenizer = Tokenizer(byte_level)
    token_ids = tokenizer.encode("hello world, the quick")
    text = RequestText(tokenizer.detokenizer(), stop=StopStrings(["o w"]))
    assert text.push(token_ids) == "hell"
    assert text.stop_reason == "o w"
    assert text.num_tokens < len(token_ids)
    assert text.push(token_ids) == ""


def test_stop_strings_wait_for_min_tokens(byte_level: Backend) -> None:
    tokenizer = Tokenizer(byte_level)
    token_ids = tokenizer.encode("the the the the")
    text = RequestText(tokenizer.detokenizer(), stop=StopStrings(["the"]), min_tokens=2)
    assert text.push(token_ids[:2]) == tokenizer.decode(token_ids[:2])
    assert text.stop_reason is None
    text.push(token_ids[2:])
    assert text.stop_reason == "the"


def test_flush_gives_what_was_held_back(byte_level: Backend) -> None:
    tokenizer = Tokenizer(byte_level)
    text = RequestText(tokenizer.detokenizer(), stop=StopStrings(["world!"]))
    shown = text.push(tokenizer.encode("hello world"))
    assert shown == "hello "
    assert text.flush() == "world"


def test_token_that_stopped_it_counts_but_does_not_show(byte_level: Backend) -> None:
    tokenizer = Tokenizer(byte_level)
    token_ids = tokenizer.encode("hello world")
    for stop in ([], ["zzz"]):
        text = RequestText(tokenizer.detokenizer(), stop=StopStrings(stop))
        assert text.push(token_ids, stopped=True) == tokenizer.decode(token_ids[:-1])
        assert text.num_tokens == len(token_ids)
    kept = RequestText(tokenizer.detokenizer(), include_stop_str_in_output=True)
    assert kept.push(token_ids, stopped=True) == "hello world"
