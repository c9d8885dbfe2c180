"""Limits of an engine. Requests that exceed them can never run, and are rejected before they are
queued."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from worker.protocol.blocks import TOKEN_BYTES
from worker.protocol.diffusion import CANVAS_ALGORITHM, EDITING
from worker.protocol.messages import EngineInfo, Rejection, Submit
from worker.protocol.pooling import PoolingInfo, PoolingParams
from worker.protocol.sampling import MAX_BAD_WORDS_TOKENS, MAX_LOGIT_BIASES, SamplingParams


class Overflow(NamedTuple):
    """Token counts for a prompt that exceeds the context length."""

    num_tokens: int
    """Number of tokens in the prompt; a lower bound if it is not tokenized."""
    max_prompt_tokens: int
    """Maximum number of tokens in a prompt, which leaves room for one generated token."""


class Problem(NamedTuple):
    """Reason why a request can never run."""

    param: str
    """Invalid field: a field of SamplingParams, or `prompt`."""
    message: str
    """Message for the client, which includes the value and the limit."""
    overflow: Overflow | None = None
    """Token counts if the prompt exceeds the context length, so that each API can word the error
    its own way; otherwise None."""


class Limits(msgspec.Struct, frozen=True):
    """Part of EngineInfo that determines which requests can run; equal for identical workers."""

    max_model_len: int
    max_total_tokens: int
    """Maximum number of tokens of one request (prompt plus completion) that fit in the KV cache."""
    vocab_size: int
    block_size: int
    """Tokens per block in block diffusion; 1 for an autoregressive model."""
    dllm_algorithm: str
    """Default decoding algorithm; empty for an autoregressive model."""
    has_edit_tokens: bool
    """Whether a block-diffusion model has tokens for deletion and insertion."""
    pooling: PoolingInfo | None = None
    """Properties of a pooling model; None for a model that generates text."""

    @classmethod
    def of(cls, info: EngineInfo) -> Limits:
        """Limits of a worker's engine."""
        return cls(
            info.max_model_len,
            info.max_total_tokens,
            info.vocab_size,
            info.block_size,
            info.dllm_algorithm,
            info.has_edit_tokens,
            info.pooling,
        )

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of prompt plus completion."""
        return min(self.max_model_len, self.max_total_tokens)

    @property
    def max_prompt_tokens(self) -> int:
        """Maximum number of tokens in a prompt, which leaves room for one generated token if the
        model generates any."""
        return self.max_tokens - (self.pooling is None)


def refuse(
    submit: Submit, info: EngineInfo, known: dict[int, Problem | None] | None = None
) -> Rejection | None:
    """Rejection of `submit` if it can never run on an engine like `info`; otherwise None.

    This protects ranks from invalid requests: a token id outside the embedding would crash a rank.
    A `max_tokens` that exceeds the context is accepted: generation then ends with finish reason
    "length" at the model's maximum.

    Args:
        submit: one request.
        info: the engine.
        known: problems by `id()` of the sampling parameters, which the submits of a batch share;
            extended by this call.
    """
    limits = Limits.of(info)
    num_tokens, odd_bytes = divmod(len(submit.prompt), TOKEN_BYTES)
    problem: Problem | None = None
    if odd_bytes:
        message = f"the prompt must consist of int32 token ids, got {len(submit.prompt)} bytes"
        problem = Problem("prompt", message)
    elif num_tokens and not 0 <= submit.num_resumed < num_tokens:
        message = f"num_resumed must be in [0, {num_tokens}), got {submit.num_resumed}"
        problem = Problem("prompt", message)
    problem = (
        problem
        or prompt_problem(limits, num_tokens)
        or token_problem(limits, largest_token(submit.prompt))
        or room_problem(limits, submit.sampling, num_tokens - submit.num_resumed)
        or _parameters(limits, submit.sampling, {} if known is None else known)
    )
    if problem is None:
        return None
    return Rejection(
        request_id=submit.request_id,
        attempt=submit.attempt,
        message=problem.message,
        status=400,
        param=problem.param,
    )


def prompt_problem(limits: Limits, num_tokens: int) -> Problem | None:
    """Problem with a prompt that is empty or too long; None if there is none."""
    if num_tokens == 0:
        return Problem("prompt", "the prompt is empty: send at least one token")
    if num_tokens <= limits.max_prompt_tokens:
        return None
    return too_long(f"your prompt has {num_tokens} tokens", num_tokens, limits.max_tokens, limits)


def too_long(found: str, num_tokens: int, max_tokens: int, limits: Limits | None = None) -> Problem:
    """Creates the problem for a prompt that exceeds the context length.

    Coding agents compact their conversation if the message matches one of their patterns, including
    `maximum context length is N tokens` and `reduce the length of the messages`: keep both phrases.

    Args:
        found: clause of the message that states the length of the prompt, such as "your prompt has
            9000 tokens".
        num_tokens: number of tokens in the prompt; a lower bound if it is not tokenized.
        max_tokens: maximum number of tokens of prompt plus completion.
        limits: the engine's limits, so that the message mentions the KV cache if its size is the
            limiting factor; None never mentions it.
    """
    is_small = limits is not None and limits.max_total_tokens < limits.max_model_len
    cache = f" (KV cache; the model supports {limits.max_model_len})" if limits and is_small else ""
    length = f"This model's maximum context length is {max_tokens} tokens{cache}. However, {found}"
    if limits is not None and limits.pooling is not None:
        message = f"{length}. Please reduce the length of the input."
        return Problem("prompt", message, Overflow(num_tokens, max_tokens))
    message = f"{length}, and at least 1 is generated. Please reduce the length of the messages."
    return Problem("prompt", message, Overflow(num_tokens, max_tokens - 1))


def token_problem(limits: Limits, token_id: int) -> Problem | None:
    """Problem with a prompt whose largest token id (unsigned) is outside the vocabulary; None if
    there is none."""
    if token_id < limits.vocab_size:
        return None
    shown = token_id - 2**32 if token_id >= 2**31 else token_id
    return Problem(
        "prompt", f"token id {shown} is out of range: the vocabulary has {limits.vocab_size} tokens"
    )


def room_problem(limits: Limits, sampling: SamplingParams, num_tokens: int) -> Problem | None:
    """Problem with a `min_tokens` that does not fit after a prompt of `num_tokens` tokens; None if
    there is none."""
    num_left = limits.max_tokens - num_tokens
    if sampling.min_tokens <= num_left:
        return None
    return Problem(
        "min_tokens",
        f"min_tokens is {sampling.min_tokens}, but after a prompt of {num_tokens} tokens only "
        f"{num_left} can be generated",
    )


def sampling_problem(limits: Limits, sampling: SamplingParams) -> Problem | None:
    """Problem with the first sampling parameter that has an unknown token id, exceeds a maximum or
    is unsupported for the kind of model; None if there is none."""
    num_tokens = sum(map(len, sampling.bad_words_token_ids))
    for name, unit, count, limit in (
        ("logit_bias", "tokens", len(sampling.logit_bias or ()), MAX_LOGIT_BIASES),
        (
            "bad_words",
            "tokens (each word without and with a space before it)",
            num_tokens,
            MAX_BAD_WORDS_TOKENS,
        ),
    ):
        if count > limit:
            return Problem(
                name,
                f"Requested {name} of {count} {unit}, which is greater than max allowed: {limit}",
            )
    for name, token_ids in (
        ("logit_bias", sampling.logit_bias or ()),
        ("allowed_token_ids", sampling.allowed_token_ids or ()),
        ("stop_token_ids", sampling.stop_token_ids),
        ("logprob_token_ids", sampling.logprob_token_ids),
        ("bad_words_token_ids", [token for word in sampling.bad_words_token_ids for token in word]),
    ):
        if (token_id := max(token_ids, default=0)) >= limits.vocab_size:
            return Problem(
                name,
                f"{name} has token id {token_id}, which is out of range: the vocabulary has "
                f"{limits.vocab_size} tokens",
            )
    return _unsuited(limits, sampling)


def largest_token(prompt: bytes) -> int:
    """Largest token id of a prompt, as an unsigned number, so that negative ids exceed every
    vocabulary."""
    return int(np.frombuffer(prompt, dtype="<u4").max(initial=0))


def _parameters(
    limits: Limits, sampling: SamplingParams, known: dict[int, Problem | None]
) -> Problem | None:
    if id(sampling) not in known:
        known[id(sampling)] = sampling_problem(limits, sampling)
    return known[id(sampling)]


def _unsuited(limits: Limits, sampling: SamplingParams) -> Problem | None:
    """Problem with the first parameter that is unsupported for the kind of model; None if there is
    none."""
    if limits.pooling is not None or sampling.pooling is not None:
        return _pooling_problem(limits.pooling, sampling.pooling)
    if limits.block_size == 1:
        if sampling.diffusion is None:
            return None
        message = "requires a block-diffusion model, but this model is autoregressive: remove it"
        return Problem("diffusion", f"diffusion {message}")
    problems = {
        "bad_words": bool(sampling.bad_words or sampling.bad_words_token_ids),
        "prompt_logprobs": sampling.prompt_logprobs is not None,
        "logprob_token_ids": bool(sampling.logprob_token_ids),
        "thinking_token_budget": sampling.thought is not None
        and sampling.thought.budget is not None,
    }
    for name, is_requested in problems.items():
        if is_requested:
            return Problem(
                name,
                f"{name} is not supported for block-diffusion models, which generate the tokens of "
                "a block in arbitrary order: remove it",
            )
    if limits.dllm_algorithm == CANVAS_ALGORITHM:
        return _unsuited_for_canvases(sampling)
    requested = sampling.diffusion.algorithm if sampling.diffusion is not None else None
    algorithm = requested or limits.dllm_algorithm
    if sampling.structured_outputs is not None and algorithm in EDITING:
        return Problem(
            "structured_outputs",
            f"structured_outputs is not supported with {algorithm}, which replaces decoded "
            'tokens: use "diffusion": {"algorithm": "LowConfidence"}',
        )
    return _unsuited_for_moves(limits, sampling) if algorithm == "JointThresholdInDel" else None


def _pooling_problem(info: PoolingInfo | None, params: PoolingParams | None) -> Problem | None:
    """Problem with a request for a vector to a model that generates text, with a request for text
    to a pooling model, or with an unsupported number of dimensions; None if there is none."""
    if info is None:
        return Problem(
            "model",
            "this model generates text: use /v1/chat/completions, or serve it with --task embed "
            "for embeddings",
        )
    if params is None:
        routes = "/v1/embeddings" if info.task == "embed" else "/classify, /score or /v1/rerank"
        return Problem("model", f"this model does not generate text: use {routes}")
    size = params.dimensions
    if size is None:
        return None
    if info.task != "embed":
        return Problem(
            "dimensions",
            "dimensions is only supported for embeddings, but this model is a classifier: remove "
            "it",
        )
    if size > info.size or (info.dimensions and size not in info.dimensions):
        allowed = f"at most {info.size}"
        if info.dimensions:
            allowed = f"one of {', '.join(map(str, info.dimensions))}"
        return Problem("dimensions", f"dimensions must be {allowed}, got {size}")
    return None


def _unsuited_for_canvases(sampling: SamplingParams) -> Problem | None:
    """Problem with the first parameter that models with canvases do not support; None if there is
    none."""
    if sampling.structured_outputs is not None:
        return Problem(
            "structured_outputs",
            "structured_outputs is not supported for this model, which resamples the whole canvas "
            "every round: remove it, or use a model with another algorithm",
        )
    params = sampling.diffusion
    for name in ("algorithm", "threshold", "edit_threshold", "max_post_edit_steps", "penalty"):
        if params is not None and getattr(params, name) is not None:
            return Problem(
                "diffusion",
                f"diffusion.{name} is not supported for this model, whose algorithm is "
                f"{CANVAS_ALGORITHM}: remove it",
            )
    return None


def _unsuited_for_moves(limits: Limits, sampling: SamplingParams) -> Problem | None:
    """Problem with the first parameter that is unsupported by an algorithm that deletes and inserts
    tokens; None if there is none."""
    if not limits.has_edit_tokens:
        return Problem(
            "diffusion",
            "JointThresholdInDel requires a model with delete_token_id and split_token_id in "
            "config.json: use JointThreshold",
        )
    problems = {
        "frequency_penalty": sampling.frequency_penalty != 0.0,
        "presence_penalty": sampling.presence_penalty != 0.0,
        "repetition_penalty": sampling.repetition_penalty != 1.0,
        "min_tokens": sampling.min_tokens > 0,
        "logprobs": sampling.logprobs is not None,
    }
    for name, is_requested in problems.items():
        if is_requested:
            return Problem(
                name,
                f"{name} is not supported with JointThresholdInDel, which moves tokens within "
                'their block: remove it, or use "diffusion": {"algorithm": "JointThreshold"}',
            )
    return None
