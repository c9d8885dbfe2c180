"""Logits parameters: the sampling parameters that ranks apply to logits."""

from __future__ import annotations

from array import array
from functools import lru_cache

from worker.core.request import Request
from worker.plan.plan import LogitsParams


def logits_params(request: Request) -> LogitsParams | None:
    """Logits processors and log-probabilities that a request needs; None if it needs none."""
    sampling = request.sampling
    if not (
        sampling.has_penalties
        or sampling.logit_bias
        or sampling.allowed_token_ids
        or sampling.bad_words_token_ids
        or sampling.min_tokens
        or sampling.logprobs is not None
        or sampling.prompt_logprobs is not None
    ):
        return None
    bias = sampling.logit_bias or {}
    return LogitsParams(
        num_prompt=request.num_prompt,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        bias_token_ids=list(bias),
        biases=list(bias.values()),
        allowed_token_ids=_packed(sampling.allowed_token_ids or ()),
        bad_words=[list(word) for word in sampling.bad_words_token_ids],
        min_tokens=sampling.min_tokens,
        stop_token_ids=sorted(request.end_token_ids) if sampling.min_tokens else [],
        num_logprobs=_count(sampling.logprobs),
        logprob_token_ids=list(sampling.logprob_token_ids),
        num_prompt_logprobs=(
            _count(sampling.prompt_logprobs) if request.needs_prompt_logprobs else -1
        ),
    )


@lru_cache(maxsize=1)
def _packed(token_ids: tuple[int, ...]) -> bytes:
    """Token ids as little-endian int32, packed once for all completions of a request: packing a
    whole vocabulary of 152k tokens takes several ms."""
    return array("i", token_ids).tobytes()


def _count(number: int | None) -> int:
    return -1 if number is None else number
