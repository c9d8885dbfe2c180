"""Bodies of the API's requests. Names follow OpenAI, extras follow vLLM."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from router.api.structured import refuse_large_grammars
from router.api.values import refuse_many_values
from router.errors import bad_request
from worker.wire.sampling import MAX_LOGPROBS, MAX_TOKEN_ID
from worker.wire.slo import Slo

MAX_CHOICES = 128
MAX_STOP_STRINGS = 128
MAX_STOP_TOKENS = 1024
MAX_BAD_WORDS = 256
MAX_BIASED_TOKENS = 1024
MAX_CACHE_SALT = 1024
"""Characters."""

TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]


class StreamOptions(msgspec.Struct, frozen=True):
    """What a streamed response carries besides text."""

    include_usage: bool | None = False
    """A last chunk with the token counts."""
    continuous_usage_stats: bool | None = False
    """The counts so far in every chunk."""


class CommonRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Fields of both completion routes. None means the default, as many clients send it.

    Fields that have the name of one of SamplingParams become that one, whose bounds are checked
    there; the bounds here are the gateway's own.
    """

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(le=MAX_CHOICES)] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[TokenId, float], Meta(max_length=MAX_BIASED_TOKENS)] | None = None
    bad_words: Annotated[list[str], Meta(max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool | None = False
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = True
    cache_salt: Annotated[str, Meta(max_length=MAX_CACHE_SALT)] | None = None
    prompt_cache_key: str | None = None
    """Name of the conversation, for policies that keep one together."""
    priority: Annotated[int, Meta(ge=0, le=9)] | None = None
    slo: Slo | None = None
    user: str | None = None
    return_token_ids: bool | None = False
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    diffusion: dict[str, Any] | None = None
    """How a block-diffusion model fills its blocks; see worker.wire.diffusion."""


class ChatRequest(CommonRequest, kw_only=True, frozen=True):
    """Body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = True
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(CommonRequest, kw_only=True, frozen=True):
    """Body of /v1/completions."""

    prompt: str | list[Any]
    """A text, texts, token ids, or lists of token ids."""
    add_special_tokens: bool | None = True
    logprobs: int | None = None
    echo: bool | None = False


Body = TypeVar("Body", ChatRequest, CompletionRequest)


def parse_body(body: bytes, kind: type[Body]) -> Body:
    """Decodes and checks a body.

    Raises:
        ApiError: 400 that names the field: malformed JSON, a wrong type, a missing field, or a
            known field that would change the result and is not supported; or too many values.
    """
    refuse_many_values(body)
    refuse_large_grammars(body)
    fields = json_object(body)
    _refuse_unsupported(fields, kind.__struct_fields__)
    try:
        return msgspec.convert(fields, kind, str_keys=True)
    except (msgspec.ValidationError, OverflowError) as error:
        raise bad_request(*_explain(fields, kind, error)) from error


def json_object(body: bytes) -> dict[str, Any]:
    """The object that a body is. Raises ApiError (400) where it is none."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"the body is not valid JSON: {error}") from error
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None
    if not isinstance(fields, dict):
        raise bad_request("the body must be a JSON object")
    return fields


def _none_of(*harmless: Any) -> Callable[[Any], bool]:
    return lambda value: value is None or any(value == other for other in harmless)


_HARMLESS: dict[str, Callable[[Any], bool]] = {
    "top_logprobs": _none_of(0),
    "length_penalty": _none_of(1),
    "use_beam_search": _none_of(False),
    "best_of": _none_of(1),
    "echo": _none_of(False),
    "suffix": _none_of(""),
    "functions": _none_of([]),
    "function_call": _none_of("none"),
    "guided_json": _none_of(),
    "guided_regex": _none_of(),
    "guided_choice": _none_of(),
    "guided_grammar": _none_of(),
    "modalities": _none_of([], ["text"]),
    "audio": _none_of(),
    "web_search_options": _none_of(),
    "documents": _none_of([]),
    "chat_template": _none_of(),
    "continue_final_message": _none_of(False),
    "logits_processors": _none_of([]),
    "truncate_prompt_tokens": _none_of(),
    "prompt_embeds": _none_of(),
    "mm_processor_kwargs": _none_of({}),
    "thinking_token_budget": _none_of(),
    "kv_transfer_params": _none_of(),
    "vllm_xargs": _none_of({}),
}
"""Fields that change what is generated and are not supported, by one route or both: the values
that change nothing. Other unknown fields (user, metadata, store, ...) are ignored."""


def _refuse_unsupported(fields: Mapping[str, Any], supported: Collection[str]) -> None:
    for name, value in fields.items():
        harmless = None if name in supported else _HARMLESS.get(name)
        if harmless is not None and not harmless(value):
            raise bad_request(f"{name} is not supported by this server: leave it out", name)
    if fields.get("tools") and fields.get("tool_choice") != "none":
        raise bad_request("tools is not supported by this server: leave it out", "tools")


def _explain(
    fields: Mapping[str, Any], kind: type[msgspec.Struct], error: Exception
) -> tuple[str, str | None]:
    """(message, field) of a body that is no `kind`: the first field that cannot be converted."""
    for field in msgspec.structs.fields(kind):
        name = field.encode_name
        if name not in fields:
            if field.required:
                return f"{name} is missing", name
            continue
        try:
            msgspec.convert(fields[name], field.type, str_keys=True)
        except msgspec.ValidationError as problem:
            # For the reader alone: where in the field's value it is comes last.
            what, _, where = str(problem).partition(" - at `$")
            return f"{name}{where.rstrip('`')}: {what}", name
        except OverflowError as problem:
            return f"{name} holds a number that is too large: {problem}", name
    return str(error), None
