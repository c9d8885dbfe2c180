"""Finish conditions of requests: EOS and stop tokens, length, or grammar."""

from __future__ import annotations

from worker.core.grammar.state import GrammarAdvance, GrammarProblem
from worker.core.request import Request, RequestState
from worker.protocol.sampling import SamplingParams


def take_tokens(
    request: Request, token_ids: list[int], advance: GrammarAdvance | None
) -> RequestState | None:
    """Appends sampled tokens to a request, up to its end; returns its final state, or None if it
    continues.

    A token that the grammar does not allow fails the request, since other parameters must have
    excluded all allowed tokens. A complete grammar ends the request, regardless of `min_tokens` and
    `ignore_eos`; a slow grammar reports its completion later.

    Args:
        request: a request that has not ended.
        token_ids: tokens in sampling order.
        advance: outcome of its grammar for these tokens; None if there is none.
    """
    state: RequestState | None = None
    known, ends, limit = request.token_ids, request.end_token_ids, request.limit
    for token_id in token_ids if advance is None else token_ids[: advance.num_taken]:
        known.append(token_id)
        if token_id in ends or len(known) >= limit:
            state = _finish_state(request, token_id, len(known))
            if state is not None:
                break
    if advance is not None:
        request.grammar = advance.status
        problem = advance.problem
        if advance.is_refused:
            problem = _contradiction(request.sampling, known[-1])
        if problem is not None:
            request.give_up(problem)
            return RequestState.FINISHED_ERROR
        if state is None and advance.status.is_complete:
            return RequestState.FINISHED_STOPPED
    return state


def tokens_up_to_end(request: Request, token_ids: list[int]) -> tuple[list[int], bool]:
    """Tokens up to the first one that ends the request (regardless of its grammar), and whether any
    does."""
    known = len(request.token_ids)
    for count, token_id in enumerate(token_ids, 1):
        if _finish_state(request, token_id, known + count) is not None:
            return token_ids[:count], True
    return token_ids, False


def _finish_state(request: Request, token_id: int, num_tokens: int) -> RequestState | None:
    """Final state of a request that has `num_tokens` tokens (prompt included), the last of which is
    `token_id`; None if the request continues.

    EOS and stop tokens end a request that has at least `min_tokens` tokens of output; the token
    stays in the output.
    """
    num_output = num_tokens - request.num_prompt
    if token_id in request.end_token_ids and num_output >= request.sampling.min_tokens:
        return RequestState.FINISHED_STOPPED
    return RequestState.FINISHED_LENGTH if num_tokens >= request.limit else None


def _contradiction(sampling: SamplingParams, token_id: int) -> GrammarProblem:
    """Problem to report if other parameters led to a token that the grammar does not allow."""
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
        f"structured_outputs: {' and '.join(given)} exclude every token that the grammar allows",
        400,
    )


def stop_reason(request: Request, eos_token_ids: tuple[int, ...]) -> int | None:
    """Stop token that ended a stopped request; None if an EOS token or a grammar ended it, or if it
    is a pooling request, whose last token is the prompt's."""
    token_id = request.token_ids[-1]
    if request.is_pooled or token_id not in request.end_token_ids:
        return None
    if token_id in eos_token_ids and not request.sampling.ignore_eos:
        return None
    return token_id
