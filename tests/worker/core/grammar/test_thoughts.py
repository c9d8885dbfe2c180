"""Reasoning before structured output: where it may begin, that it must end, and its drafts."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.worker.vocabularies import EOS, TOKENS, VOCAB_SIZE, allowed, make_backend
from worker.core.grammar.matcher_state import MatcherState
from worker.core.grammar.thoughts import ThoughtMatcher
from worker.protocol.sampling import SamplingParams
from worker.protocol.structured import StructuredOutputsParams, ThoughtTokens

OPENING, CLOSING = 1, 2
BACKEND = make_backend("xgrammar")
LOADED = BACKEND.load(BACKEND.compile(StructuredOutputsParams(regex="ab[0-9]")))
FIRST = {ord("a"), TOKENS.index(b"ab")}
ANY = set(range(VOCAB_SIZE)) - {EOS}


def make_state(*, is_open: bool, output: Sequence[int] = ()) -> MatcherState:
    thought = ThoughtTokens(opening=OPENING, closing=CLOSING, is_open=is_open)
    matcher = ThoughtMatcher(LOADED(), thought, eos_token_ids=[EOS], vocab_size=VOCAB_SIZE)
    return MatcherState(
        matcher, SamplingParams(), eos_token_ids=[EOS], vocab_size=VOCAB_SIZE, output=output
    )


def test_structured_output_begins_after_reasoning() -> None:
    state = make_state(is_open=True)
    for token_id in (ord("x"), OPENING, ord("a")):
        assert allowed(state) == ANY
        assert state.advance(token_id) is None
    assert state.advance(CLOSING) is None
    assert allowed(state) == FIRST, "reasoning cannot start again"
    for token_id in (ord("a"), ord("b"), ord("7")):
        assert not state.is_complete
        assert state.advance(token_id) is None
    assert state.is_complete


def test_reasoning_may_require_a_sequence_to_end() -> None:
    """As in harmony, where the same token ends other headers."""
    thought = ThoughtTokens(opening=OPENING, closing=CLOSING, before=(7, 8), is_open=True)
    matcher = ThoughtMatcher(LOADED(), thought, eos_token_ids=[EOS], vocab_size=VOCAB_SIZE)
    state = MatcherState(
        matcher, SamplingParams(), eos_token_ids=[EOS], vocab_size=VOCAB_SIZE, output=[]
    )
    for token_id in (CLOSING, 8, CLOSING, 7, CLOSING, 7, 8):
        assert state.advance(token_id) is None
        assert allowed(state) == ANY
    drafts = [CLOSING, ord("a"), ord("b")]
    assert state.walk(drafts) == state.walk(drafts), "the state stays as it is"
    assert state.advance(CLOSING) is None
    assert allowed(state) == FIRST


def test_reasoning_may_only_begin_with_the_first_token() -> None:
    state = make_state(is_open=False)
    assert allowed(state) == FIRST | {OPENING}
    assert state.advance(ord("a")) is None
    assert allowed(state) == {ord("b")}
    state = make_state(is_open=False, output=[OPENING, ord("x")])
    assert allowed(state) == ANY
    assert (
        make_state(is_open=False, output=[OPENING, CLOSING]).mask
        == make_state(is_open=True, output=[CLOSING]).mask
    )


def test_drafts_cross_the_end_of_reasoning() -> None:
    for is_open, before in ((True, []), (False, [OPENING])):
        state = make_state(is_open=is_open)
        drafts = [*before, ord("x"), CLOSING, ord("a"), ord("b")]
        masks = state.walk(drafts)
        assert masks == state.walk(drafts), "the state stays as it is"
        for mask, token_id in zip(masks, drafts, strict=False):
            assert state.mask == mask
            state.advance(token_id)
        assert state.mask == masks[-1]
