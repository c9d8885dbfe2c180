"""From request fields to what a model is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from router.api.protocol import ChatRequest, CommonRequest, CompletionRequest, StreamOptions
from router.api.structured import structured_outputs
from router.errors import bad_request
from worker.wire.diffusion import DiffusionParams
from worker.wire.sampling import MAX_LOGPROBS, InvalidParameter, SamplingParams

MAX_CHOICES = 128
MAX_COMPLETIONS = 2048
"""Prompts of one request times its n."""
MAX_ENTRIES = 2**20
"""Texts and tokens in the parameters of one request, times its completions: the engine keeps some
of them per completion, a million in a tenth of a second and 50 MB."""
MAX_STOP_STRINGS = 128
MAX_STOP_CHARACTERS = 8192
"""Of all stop strings together; each choice follows each of them through its text."""
MAX_STOP_TOKENS = 1024
MAX_BAD_WORDS = 256
MAX_BIASED_TOKENS = 1024
MAX_TOKEN_DIGITS = 10
MAX_CACHE_SALT = 1024
DEFAULT_COMPLETION_TOKENS = 16
RESERVED_TEMPLATE_NAMES = (
    "messages",
    "tools",
    "add_generation_prompt",
    "chat_template",
    "tokenize",
    "self",
)
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def sampling_params(
    request: CommonRequest,
    max_tokens: int | None,
    defaults: Mapping[str, Any],
    *,
    names: Mapping[str, str],
    vocab_size: int,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Sampling parameters; what the client left open comes from `defaults`, then from vLLM's.

    `names` has the client's names of what is called otherwise here, see `client_names`.

    Raises:
        ApiError: 400 that names the field and its range.
    """
    given = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "min_p": request.min_p,
        "min_tokens": request.min_tokens,
        "frequency_penalty": request.frequency_penalty,
        "presence_penalty": request.presence_penalty,
        "repetition_penalty": request.repetition_penalty,
    }
    values = {**defaults, **{name: value for name, value in given.items() if value is not None}}
    n = 1 if request.n is None else request.n
    if n > MAX_CHOICES:
        raise bad_request(f"n must be at most {MAX_CHOICES}, got {n}", "n")
    try:
        return SamplingParams(
            n=n,
            seed=request.seed,
            max_tokens=max_tokens,
            stop=_stop_strings(request),
            stop_token_ids=_stop_tokens(request),
            ignore_eos=bool(request.ignore_eos),
            include_stop_str_in_output=bool(request.include_stop_str_in_output),
            skip_special_tokens=request.skip_special_tokens is not False,
            logit_bias=_logit_bias(request),
            bad_words=_bad_words(request),
            allowed_token_ids=_allowed_tokens(request, vocab_size),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            structured_outputs=structured_outputs(request),
            diffusion=_diffusion(request),
            **values,
        )
    except InvalidParameter as error:
        raise bad_request(error.message, names.get(error.param, error.param)) from error


def client_names(request: ChatRequest | CompletionRequest) -> dict[str, str]:
    """The client's names of the fields that errors name: it has a choice of some."""
    names = {}
    if isinstance(request, ChatRequest):
        names["prompt"] = "messages"
        if request.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
    if request.structured_outputs is None and request.response_format is not None:
        names["structured_outputs"] = "response_format"
    return names


def chat_max_tokens(request: ChatRequest) -> int | None:
    """None lets a chat continue to the end of the model's length."""
    if request.max_completion_tokens is not None:
        return request.max_completion_tokens
    return request.max_tokens


def completion_max_tokens(request: CompletionRequest) -> int:
    """Plain completions are short by default."""
    return DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens


def chat_logprobs(request: ChatRequest) -> int | None:
    """Likeliest tokens to name beside each; None for no log-probabilities. Raises ApiError."""
    if not request.logprobs:
        if request.top_logprobs:
            raise bad_request("top_logprobs is only allowed with logprobs", "top_logprobs")
        return None
    num_top = request.top_logprobs or 0
    if not 0 <= num_top <= MAX_LOGPROBS:
        raise bad_request(
            f"top_logprobs must be in [0, {MAX_LOGPROBS}], got {num_top}", "top_logprobs"
        )
    return num_top


def prompt_logprobs(request: CommonRequest) -> int | None:
    """None for none. Raises ApiError for a stream, whose chunks have no place for them."""
    if request.prompt_logprobs is not None and request.stream:
        raise bad_request("prompt_logprobs is not available with stream", "prompt_logprobs")
    return request.prompt_logprobs


def check_num_completions(num_prompts: int, sampling: SamplingParams) -> None:
    """Raises ApiError where one request asks for too many, or for too much with all of them."""
    n = sampling.n
    field = "n" if n > 1 else "prompt"
    if num_prompts * n > MAX_COMPLETIONS:
        raise bad_request(
            f"{num_prompts} prompts with n = {n} are {num_prompts * n} completions, at most "
            f"{MAX_COMPLETIONS} per request",
            field,
        )
    if num_prompts * n * sampling.num_entries > MAX_ENTRIES:
        raise bad_request(
            f"{num_prompts * n} completions with {sampling.num_entries} texts and tokens in stop, "
            "stop_token_ids, logit_bias, bad_words and allowed_token_ids are too much for one "
            f"request: at most {MAX_ENTRIES} of them, counted once per completion",
            field,
        )


def cache_salt(request: CommonRequest) -> str:
    """Empty for none. Raises ApiError where it is too long."""
    value = request.cache_salt or ""
    if len(value) > MAX_CACHE_SALT:
        raise bad_request(
            f"cache_salt must have at most {MAX_CACHE_SALT} characters, got {len(value)}",
            "cache_salt",
        )
    return value


def priority(request: CommonRequest) -> int | None:
    """0 to 9, None for the default. Raises ApiError outside of that."""
    value = request.priority
    if value is not None and not 0 <= value <= 9:
        raise bad_request(f"priority must be in [0, 9], got {value}", "priority")
    return value


def stream_options(request: CommonRequest) -> StreamOptions | None:
    """None for the defaults. Raises ApiError where there is no stream."""
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options is only allowed with stream", "stream_options")
    return request.stream_options


def template_arguments(request: ChatRequest) -> dict[str, Any]:
    """Variables for the chat template. Raises ApiError for names that are not the client's."""
    values = request.chat_template_kwargs or {}
    for name in RESERVED_TEMPLATE_NAMES:
        if name in values:
            raise bad_request(f"chat_template_kwargs may not hold {name}", "chat_template_kwargs")
    return values


def chat_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates take them: content as one text.

    Raises:
        ApiError: no messages, an unknown role, or content that is not text.
    """
    if not messages:
        raise bad_request("messages must hold at least one message", "messages")
    return [_message(index, message) for index, message in enumerate(messages)]


def completion_prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """The prompts of a completion request. Raises ApiError for any other shape."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(_is_int(item) for item in prompt):
        return [prompt]
    if prompt and all(isinstance(item, str) for item in prompt):
        return prompt
    if prompt and all(isinstance(item, list) and all(map(_is_int, item)) for item in prompt):
        return prompt
    raise bad_request(
        "prompt must be a string, a list of strings, token ids, or a list of lists of token ids",
        "prompt",
    )


def _stop_strings(request: CommonRequest) -> tuple[str, ...]:
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    if len(stop) > MAX_STOP_STRINGS:
        raise bad_request(f"stop holds {len(stop)} strings, at most {MAX_STOP_STRINGS}", "stop")
    num_characters = sum(map(len, stop))
    if num_characters > MAX_STOP_CHARACTERS:
        raise bad_request(
            f"stop strings have {num_characters} characters together, at most "
            f"{MAX_STOP_CHARACTERS}",
            "stop",
        )
    return stop


def _stop_tokens(request: CommonRequest) -> tuple[int, ...]:
    token_ids = tuple(request.stop_token_ids or ())
    if len(token_ids) > MAX_STOP_TOKENS:
        raise bad_request(
            f"stop_token_ids holds {len(token_ids)} tokens, at most {MAX_STOP_TOKENS}",
            "stop_token_ids",
        )
    return token_ids


def _logit_bias(request: CommonRequest) -> dict[int, float] | None:
    given = request.logit_bias or {}
    if len(given) > MAX_BIASED_TOKENS:
        raise bad_request(
            f"logit_bias holds {len(given)} tokens, at most {MAX_BIASED_TOKENS}", "logit_bias"
        )
    biases = {}
    for token, bias in given.items():
        if not (token.isascii() and token.isdecimal() and len(token) <= MAX_TOKEN_DIGITS):
            raise bad_request(f"logit_bias has {token!r} in place of a token id", "logit_bias")
        biases[int(token)] = bias
    return biases or None


def _bad_words(request: CommonRequest) -> tuple[str, ...]:
    words = tuple(request.bad_words or ())
    num_characters = sum(map(len, words))
    if len(words) > MAX_BAD_WORDS or num_characters > MAX_STOP_CHARACTERS:
        raise bad_request(
            f"bad_words holds {len(words)} texts of {num_characters} characters, at most "
            f"{MAX_BAD_WORDS} of {MAX_STOP_CHARACTERS} together",
            "bad_words",
        )
    return words


def _allowed_tokens(request: CommonRequest, vocab_size: int) -> tuple[int, ...] | None:
    token_ids = request.allowed_token_ids
    if token_ids is None:
        return None
    if len(token_ids) > vocab_size:
        raise bad_request(
            f"allowed_token_ids holds {len(token_ids)} tokens, the vocabulary {vocab_size}",
            "allowed_token_ids",
        )
    return tuple(token_ids)


def _diffusion(request: CommonRequest) -> DiffusionParams | None:
    if request.diffusion is None:
        return None
    names = DiffusionParams.__struct_fields__
    for name in request.diffusion:
        if name not in names:
            known = ", ".join(names)
            raise bad_request(f"diffusion has no {name!r}: choose from {known}", "diffusion")
    try:
        params = msgspec.convert(request.diffusion, DiffusionParams)
    except msgspec.ValidationError as error:
        raise bad_request(f"diffusion: {error}", "diffusion") from error
    if params.stream_drafts and not request.stream:
        raise bad_request("diffusion.stream_drafts needs stream: true", "diffusion")
    return params


def _message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        known = ", ".join(ROLES)
        raise bad_request(f"messages[{index}].role must be one of {known}", "messages")
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_part(index, part) for part in content)
    elif content is not None and not isinstance(content, str):
        raise bad_request(
            f"messages[{index}].content must be a string or a list of parts", "messages"
        )
    return {**message, "content": content if content is not None else ""}


def _part(index: int, part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise bad_request(f"messages[{index}].content may only have parts of type text", "messages")
    return text


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
