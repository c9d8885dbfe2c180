"""Reasoning before structured output: where it may begin, that it must end, and its drafts."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

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


def make_free(budget: int, *, is_open: bool = True, output: Sequence[int] = ()) -> MatcherState:
    """A state of free text with a thinking budget; `before` and `leading` are as in harmony."""
    thought = ThoughtTokens(
        opening=OPENING,
        closing=CLOSING,
        leading=(6,),
        before=(7, 8),
        is_open=is_open,
        budget=budget,
    )
    matcher = ThoughtMatcher(None, thought, eos_token_ids=[EOS], vocab_size=VOCAB_SIZE)
    sampling = SamplingParams()
    return MatcherState(
        matcher, sampling, eos_token_ids=[EOS], vocab_size=VOCAB_SIZE, output=output
    )


@given(
    budget=st.integers(0, 5),
    is_open=st.booleans(),
    choices=st.lists(st.sampled_from([OPENING, CLOSING, 6, 7, 8, 9]), max_size=14),
    num_drafts=st.integers(0, 6),
)
def test_reasoning_ends_at_its_budget(
    budget: int, is_open: bool, choices: list[int], num_drafts: int
) -> None:
    """For any tokens: with drafts, after a resumption, and however the reasoning has ended."""
    state = make_free(budget, is_open=is_open)
    output: list[int] = []
    has_begun, has_ended = is_open, False
    for choice in choices:
        found = allowed(state)
        drafts = choices[:num_drafts]
        assert (
            state.walk(drafts)[0]
            == state.mask
            == make_free(budget, is_open=is_open, output=output).mask
        )
        if len(found) > 1:
            assert found == set(range(VOCAB_SIZE)), "text is free before the budget and after it"
        token_id = choice if choice in found else min(found)
        masks = state.walk([token_id, *drafts])
        assert state.advance(token_id) is None
        assert state.mask == masks[1] or token_id not in found
        output.append(token_id)
        if not has_begun and len(output) == 1:
            has_begun = token_id == OPENING
        thought = output[0 if is_open else 1 :]
        has_ended = has_ended or (has_begun and output[-3:] == [7, 8, CLOSING])
        if has_begun and not has_ended:
            assert len(thought) < budget + 4, "the budget, then at most the tokens that end it"
        assert state.is_free == (has_ended or not has_begun)
        assert not state.is_free or allowed(state) == set(range(VOCAB_SIZE))


def test_a_budget_before_structured_output() -> None:
    thought = ThoughtTokens(opening=OPENING, closing=CLOSING, is_open=True, budget=1)
    matcher = ThoughtMatcher(LOADED(), thought, eos_token_ids=[EOS], vocab_size=VOCAB_SIZE)
    state = MatcherState(matcher, SamplingParams(), eos_token_ids=[EOS], vocab_size=VOCAB_SIZE)
    assert allowed(state) == ANY
    assert state.advance(ord("x")) is None
    assert allowed(state) == {CLOSING}
    assert state.advance(CLOSING) is None
    assert allowed(state) == FIRST


def test_text_that_must_match_or_must_not_end_is_not_free() -> None:
    assert not make_state(is_open=True, output=[CLOSING]).is_free
    thought = ThoughtTokens(opening=OPENING, closing=CLOSING, is_open=True, budget=1)
    matcher = ThoughtMatcher(None, thought, eos_token_ids=[EOS], vocab_size=VOCAB_SIZE)
    sampling = SamplingParams(ignore_eos=True)
    state = MatcherState(
        matcher, sampling, eos_token_ids=[EOS], vocab_size=VOCAB_SIZE, output=[CLOSING]
    )
    assert allowed(state) == ANY
    assert not state.is_free


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
