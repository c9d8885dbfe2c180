"""One request with a grammar: masks, the end, and errors."""

from __future__ import annotations

import pytest

from tests.support.worker.vocabularies import EOS, TOKENS, allowed, make_backend, make_state
from worker.core.grammar import matcher_state
from worker.core.grammar.base import GrammarBackend, GrammarFault
from worker.protocol.sampling import SamplingParams

AB = TOKENS.index(b"ab")


@pytest.fixture(params=["xgrammar", "guidance"])
def backend(request: pytest.FixtureRequest) -> GrammarBackend:
    return make_backend(request.param)


def test_masks_follow_the_tokens(backend: GrammarBackend) -> None:
    state = make_state(backend, regex="a?ab[0-9]")
    assert allowed(state) == {ord("a"), AB}
    assert state.advance(AB) is None
    assert allowed(state) == set(range(ord("0"), ord("9") + 1))
    assert not state.is_complete
    assert state.advance(ord("7")) is None
    assert state.is_complete


def test_a_text_that_may_end_may_also_continue(backend: GrammarBackend) -> None:
    state = make_state(backend, regex="a+")
    assert allowed(state) == {ord("a")}
    assert state.advance(ord("a")) is None
    assert allowed(state) == {ord("a"), EOS}
    assert not state.is_complete


@pytest.mark.parametrize(
    "sampling", [SamplingParams(ignore_eos=True), SamplingParams(min_tokens=3)]
)
def test_the_end_can_be_delayed_but_stays_reachable(
    backend: GrammarBackend, sampling: SamplingParams
) -> None:
    state = make_state(backend, regex="a{1,4}", sampling=sampling)
    for number in range(1, 4):
        assert state.advance(ord("a")) is None
        late = sampling.min_tokens and number >= sampling.min_tokens
        assert allowed(state) == {ord("a"), *([EOS] if late else [])}
    assert state.advance(ord("a")) is None
    assert state.is_complete, "nothing but the end is left, whatever puts it off"
    short = make_state(backend, regex="b", sampling=sampling)
    short.advance(ord("b"))
    assert short.is_complete


def test_one_slow_walk_ends_drafts_for_some_tokens_only(
    backend: GrammarBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make_state(backend, regex="a*")
    for pause in (32, 64):  # each further one costs as much, so it is delayed more
        with monkeypatch.context() as patch:
            patch.setattr(matcher_state, "SLOW_S", -1.0)
            state.walk([ord("a")])
        for _ in range(pause):
            assert not state.may_draft
            assert state.advance(ord("a")) is None
        assert state.may_draft


def test_tokens_of_an_earlier_attempt_are_accepted_first(backend: GrammarBackend) -> None:
    state = make_state(backend, b"12", regex="[0-9]{3}x")
    assert allowed(state) == {*range(ord("0"), ord("9") + 1)}
    assert make_state(backend, b"123x", regex="[0-9]{3}x").is_complete
    with pytest.raises(GrammarFault, match="cannot continue with token 120"):
        make_state(backend, b"1x", regex="[0-9]{3}x")


def test_allowed_token_ids_narrow_the_mask(backend: GrammarBackend) -> None:
    sampling = SamplingParams(allowed_token_ids=(ord("1"), ord("2"), ord("a")))
    state = make_state(backend, regex="[0-9][a-z][A-Z]", sampling=sampling)
    assert allowed(state) == {ord("1"), ord("2")}
    assert state.advance(ord("1")) is None
    assert allowed(state) == {ord("a")}
    problem = state.advance(ord("a"))
    assert problem is not None
    assert problem.status == 400
    assert "allowed_token_ids" in problem.message
    assert "structured_outputs" in problem.message


def test_a_token_that_the_grammar_forbids_is_rejected(backend: GrammarBackend) -> None:
    state = make_state(backend, choice=("yes", "no"))
    assert allowed(state) == {ord("y"), ord("n")}
    problem = state.advance(ord("x"))
    assert problem is not None
    assert problem.status == 500, "the mask did not allow it: an internal error"
    assert "cannot continue with token 120" in problem.message


def test_a_library_error_only_ends_the_request() -> None:
    state = make_state(make_backend("xgrammar"), regex="a")
    assert state.advance(ord("a")) is None
    assert state.is_complete
    problem = state.advance(EOS) or state.advance(EOS)
    assert problem is not None
    assert problem.status == 500
    assert problem.message.startswith("structured_outputs: ")


def test_special_tokens_have_no_text(backend: GrammarBackend) -> None:
    state = make_state(backend, regex="(.|\n)*")
    assert allowed(state) >= {ord("a"), AB, EOS}
    assert VOCAB_END not in allowed(state)


VOCAB_END = len(TOKENS) - 1
"""A token without text."""


def test_a_request_with_a_slow_matcher_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matcher_state, "CREDIT_S", 0.1)
    backend = make_backend("xgrammar")
    state = make_state(backend, regex="(a*)*" * 50)
    problem = None
    assert not state.is_slow
    for _ in range(400):
        problem = state.advance(ord("a"))
        if problem:
            break
    assert problem is not None
    assert problem.status == 400
    assert "too ambiguous" in problem.message
    assert state.is_slow
