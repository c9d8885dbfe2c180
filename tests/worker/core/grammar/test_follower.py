"""One request through its grammar: masks, the end, and what stands in its way."""

from __future__ import annotations

import pytest

from tests.support.worker.vocabularies import EOS, TOKENS, allowed, follow, make_backend
from worker.core.grammar import follower as follower_module
from worker.core.grammar.base import GrammarBackend, GrammarFault
from worker.protocol.sampling import SamplingParams

AB = TOKENS.index(b"ab")


@pytest.fixture(params=["xgrammar", "guidance"])
def backend(request: pytest.FixtureRequest) -> GrammarBackend:
    return make_backend(request.param)


def test_masks_follow_the_tokens(backend: GrammarBackend) -> None:
    follower = follow(backend, regex="a?ab[0-9]")
    assert allowed(follower) == {ord("a"), AB}
    assert follower.advance(AB) is None
    assert allowed(follower) == set(range(ord("0"), ord("9") + 1))
    assert not follower.is_complete
    assert follower.advance(ord("7")) is None
    assert follower.is_complete


def test_where_the_text_may_end_it_may_go_on_too(backend: GrammarBackend) -> None:
    follower = follow(backend, regex="a+")
    assert allowed(follower) == {ord("a")}
    assert follower.advance(ord("a")) is None
    assert allowed(follower) == {ord("a"), EOS}
    assert not follower.is_complete


@pytest.mark.parametrize(
    "sampling", [SamplingParams(ignore_eos=True), SamplingParams(min_tokens=3)]
)
def test_the_end_is_put_off_but_never_out_of_reach(
    backend: GrammarBackend, sampling: SamplingParams
) -> None:
    follower = follow(backend, regex="a{1,4}", sampling=sampling)
    for number in range(1, 4):
        assert follower.advance(ord("a")) is None
        late = sampling.min_tokens and number >= sampling.min_tokens
        assert allowed(follower) == {ord("a"), *([EOS] if late else [])}
    assert follower.advance(ord("a")) is None
    assert follower.is_complete, "nothing but the end is left, whatever puts it off"
    short = follow(backend, regex="b", sampling=sampling)
    short.advance(ord("b"))
    assert short.is_complete


def test_one_slow_walk_ends_drafts_for_some_tokens_only(
    backend: GrammarBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = follow(backend, regex="a*")
    for pause in (32, 64):  # each further one costs as much, so it comes later
        with monkeypatch.context() as patch:
            patch.setattr(follower_module, "SLOW_S", -1.0)
            follower.walk([ord("a")])
        for _ in range(pause):
            assert not follower.may_draft
            assert follower.advance(ord("a")) is None
        assert follower.may_draft


def test_tokens_of_an_earlier_attempt_are_taken_first(backend: GrammarBackend) -> None:
    follower = follow(backend, b"12", regex="[0-9]{3}x")
    assert allowed(follower) == {*range(ord("0"), ord("9") + 1)}
    assert follow(backend, b"123x", regex="[0-9]{3}x").is_complete
    with pytest.raises(GrammarFault, match="cannot continue with token 120"):
        follow(backend, b"1x", regex="[0-9]{3}x")


def test_allowed_token_ids_narrow_the_mask(backend: GrammarBackend) -> None:
    sampling = SamplingParams(allowed_token_ids=(ord("1"), ord("2"), ord("a")))
    follower = follow(backend, regex="[0-9][a-z][A-Z]", sampling=sampling)
    assert allowed(follower) == {ord("1"), ord("2")}
    assert follower.advance(ord("1")) is None
    assert allowed(follower) == {ord("a")}
    problem = follower.advance(ord("a"))
    assert problem is not None
    assert problem.status == 400
    assert "allowed_token_ids" in problem.message
    assert "structured_outputs" in problem.message


def test_a_token_that_does_not_follow_is_refused(backend: GrammarBackend) -> None:
    follower = follow(backend, choice=("yes", "no"))
    assert allowed(follower) == {ord("y"), ord("n")}
    problem = follower.advance(ord("x"))
    assert problem is not None
    assert problem.status == 500, "the mask has told, so who has drawn it?"
    assert "cannot continue with token 120" in problem.message


def test_a_library_that_fails_ends_the_request_and_nothing_else() -> None:
    follower = follow(make_backend("xgrammar"), regex="a")
    assert follower.advance(ord("a")) is None
    assert follower.is_complete
    problem = follower.advance(EOS) or follower.advance(EOS)
    assert problem is not None
    assert problem.status == 500
    assert problem.message.startswith("structured_outputs: ")


def test_special_tokens_are_no_text(backend: GrammarBackend) -> None:
    follower = follow(backend, regex="(.|\n)*")
    assert allowed(follower) >= {ord("a"), AB, EOS}
    assert VOCAB_END not in allowed(follower)


VOCAB_END = len(TOKENS) - 1
"""A token without text."""


def test_a_matcher_that_is_too_slow_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "CREDIT_S", 0.1)
    backend = make_backend("xgrammar")
    follower = follow(backend, regex="(a*)*" * 50)
    problem = None
    assert not follower.is_slow
    for _ in range(400):
        problem = follower.advance(ord("a"))
        if problem:
            break
    assert problem is not None
    assert problem.status == 400
    assert "too ambiguous" in problem.message
    assert follower.is_slow
