"""When a request ends by what it has generated."""

from __future__ import annotations

from worker.core.grammar.state import GrammarProblem
from worker.core.request import Request, RequestState
from worker.wire.sampling import SamplingParams


def finish_state(request: Request, token_id: int) -> RequestState | None:
    """The state that a request ends in after `token_id`, its latest; None if it goes on.

    A token that its grammar does not allow ends it with an error: other parameters had left none
    that it does. End tokens and stop tokens end it from `min_tokens` on; the token stays in the
    output. Where a grammar leaves nothing more to draw, that ends it too, whatever `min_tokens`
    and `ignore_eos` say; of one that is slow, that is found out later.
    """
    grammar = request.grammar
    if grammar is not None and not allows(grammar.mask, token_id):
        request.give_up(_contradiction(request.sampling, token_id))
        return RequestState.FINISHED_ERROR
    if token_id in request.end_token_ids and request.num_output >= request.sampling.min_tokens:
        return RequestState.FINISHED_STOPPED
    if len(request.token_ids) >= request.limit:
        return RequestState.FINISHED_LENGTH
    if grammar is None or grammar.is_slow:
        return None
    problem = grammar.advance(token_id)
    if problem is not None:
        request.give_up(problem)
        return RequestState.FINISHED_ERROR
    return RequestState.FINISHED_STOPPED if grammar.is_complete else None


def _contradiction(sampling: SamplingParams, token_id: int) -> GrammarProblem:
    """Of a token that the grammar does not allow: parameters that forbid tokens left no other."""
    forbidding = {
        "allowed_token_ids": sampling.allowed_token_ids is not None,
        "bad_words": bool(sampling.bad_words_token_ids),
        "min_tokens": sampling.min_tokens > 0,
        "ignore_eos": sampling.ignore_eos,
    }
    given = [name for name, is_given in forbidding.items() if is_given]
    if not given:
        problem = f"structured_outputs: internal error: the grammar does not allow token {token_id}"
        return GrammarProblem(problem, 500)
    return GrammarProblem(
        f"structured_outputs: {' and '.join(given)} left no token with which the grammar can go on",
        400,
    )


def allows(mask: bytes, token_id: int) -> bool:
    """Whether a mask, little-endian words, has the token's bit."""
    return bool(mask[token_id // 8] >> token_id % 8 & 1)


def stop_reason(request: Request, eos_token_ids: tuple[int, ...]) -> int | None:
    """The stop token that ended a stopped request; None where an end token or a grammar did."""
    token_id = request.token_ids[-1]
    if token_id not in request.end_token_ids:
        return None
    if token_id in eos_token_ids and not request.sampling.ignore_eos:
        return None
    return token_id
