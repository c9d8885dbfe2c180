"""What a worker can never serve, decided where the client can still be told."""

from __future__ import annotations

import numpy as np

from worker.wire.blocks import TOKEN_BYTES
from worker.wire.messages import EngineInfo, Rejection, Submit
from worker.wire.sampling import SamplingParams


def refuse(submit: Submit, info: EngineInfo) -> Rejection | None:
    """A rejection with the numbers if `submit` can never run on an engine like `info`, else None.

    It stands between clients and ranks: a token id that is not in the embedding would end a rank.
    `max_tokens` beyond the room that the prompt leaves is no reason: generation then ends with
    finish reason "length" at the model's maximum.
    """
    num_prompt, odd_bytes = divmod(len(submit.prompt), TOKEN_BYTES)
    limit = min(info.max_model_len, info.max_total_tokens)
    problem: str | None = None
    if odd_bytes:
        problem = f"the prompt has {len(submit.prompt)} bytes, which are no int32 token ids"
    elif num_prompt == 0:
        problem = "the prompt is empty: send at least one token"
    elif num_prompt >= limit:
        problem = (
            f"the prompt has {num_prompt} tokens, but this model takes at most {limit - 1} "
            f"(maximum model length {info.max_model_len}, KV cache {info.max_total_tokens} tokens, "
            "one token of room to generate): shorten the prompt"
        )
    elif not 0 <= submit.num_resumed < num_prompt:
        problem = f"num_resumed is {submit.num_resumed}, but the prompt has {num_prompt} tokens"
    elif submit.sampling.min_tokens > (room := limit - num_prompt + submit.num_resumed):
        problem = (
            f"min_tokens is {submit.sampling.min_tokens}, but after a prompt of "
            f"{num_prompt - submit.num_resumed} tokens only {room} can be generated"
        )
    elif (token_id := _unknown_token(submit.prompt, info.vocab_size)) is not None:
        problem = f"token id {token_id} is outside of the vocabulary of {info.vocab_size} tokens"
    else:
        problem = _unknown_parameter(submit.sampling, info.vocab_size) or _unsuited(submit, info)
    if problem is None:
        return None
    return Rejection(
        request_id=submit.request_id, attempt=submit.attempt, message=problem, status=400
    )


def _unsuited(submit: Submit, info: EngineInfo) -> str | None:
    """A complaint about the first parameter that makes no sense for this kind of model."""
    sampling = submit.sampling
    if info.block_size == 1:
        if sampling.diffusion is not None:
            return "diffusion is for block-diffusion models, this one is autoregressive"
        return None
    problems = {
        "frequency_penalty": sampling.frequency_penalty != 0.0,
        "presence_penalty": sampling.presence_penalty != 0.0,
        "repetition_penalty": sampling.repetition_penalty != 1.0,
        "logit_bias": bool(sampling.logit_bias),
        "bad_words": bool(sampling.bad_words or sampling.bad_words_token_ids),
        "allowed_token_ids": sampling.allowed_token_ids is not None,
        "min_tokens": sampling.min_tokens > 0,
        "logprobs": sampling.logprobs is not None,
        "prompt_logprobs": sampling.prompt_logprobs is not None,
    }
    for name, is_asked_for in problems.items():
        if is_asked_for:
            return (
                f"{name} is not available for this model, which decides its tokens block by block "
                "in no fixed order: leave it out"
            )
    own = sampling.diffusion.algorithm if sampling.diffusion is not None else None
    algorithm = own or info.dllm_algorithm
    if sampling.structured_outputs is not None and algorithm == "JointThreshold":
        return (
            "structured_outputs needs an algorithm that leaves decided tokens as they are, "
            'JointThreshold replaces them: ask for "diffusion": {"algorithm": "LowConfidence"}'
        )
    return None


def _unknown_parameter(sampling: SamplingParams, vocab_size: int) -> str | None:
    """A complaint about the first parameter that names a token which the model does not have."""
    for name, token_ids in (
        ("logit_bias", sampling.logit_bias or ()),
        ("allowed_token_ids", sampling.allowed_token_ids or ()),
        ("bad_words_token_ids", (token for word in sampling.bad_words_token_ids for token in word)),
    ):
        for token_id in token_ids:
            if token_id >= vocab_size:
                return (
                    f"{name} names token {token_id}, which is outside of the vocabulary of "
                    f"{vocab_size} tokens"
                )
    return None


def _unknown_token(prompt: bytes, vocab_size: int) -> int | None:
    """The first token id that the embedding does not have."""
    # Seen as unsigned, negative ids are beyond every vocabulary.
    ids = np.frombuffer(prompt, dtype="<u4")
    if ids.max() < vocab_size:
        return None
    return int(ids[ids >= vocab_size][0].astype(np.int32))
