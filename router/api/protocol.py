"""Bodies of the API's requests. Names follow OpenAI, extras follow vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from router.api.body import Payload
from router.api.fields import COMPLETIONS, Known, refuse_unknown
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
MAX_SHOWN_KEYS = 8
"""Most wrong fields that an error shows."""
MAX_SHOWN_CHARACTERS = 64
"""Most characters of each that an error shows."""

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
LogitBias = Annotated[dict[TokenId, float], Meta(max_length=MAX_BIASED_TOKENS)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a stream: what it carries besides text."""

    include_usage: bool | None = False
    """A last chunk with the token counts."""
    continuous_usage_stats: bool | None = False
    """The counts so far in every chunk, where there is a last one with them."""
    include_obfuscation: bool | None = False
    """OpenAI's padding against who sees the lengths of encrypted chunks; there is none here."""


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
    logit_bias: LogitBias | None = None
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
    return_tokens_as_token_ids: bool | None = False
    """Whether log-probabilities name tokens by their ids."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Most tokens of a prompt: the last ones are left of a longer one."""
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
    add_generation_prompt: bool | None = None
    """Whether the prompt ends where an answer begins; it does unless the last message goes on."""
    continue_final_message: bool | None = False
    """Whether the model goes on with the last message, instead of answering it."""
    documents: list[dict[str, Any]] | None = None
    """Documents for the chat template."""
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    """How much the model shall think, as far as its template has a say in it."""
    include_reasoning: bool | None = True
    """Whether the client is told what the model thought."""
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(CommonRequest, kw_only=True, frozen=True):
    """Body of /v1/completions."""

    prompt: str | list[Any]
    """A text, texts, token ids, or lists of token ids."""
    add_special_tokens: bool | None = True
    logprobs: int | None = None
    echo: bool | None = False


class TokenizeRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Body of /tokenize: a prompt or a chat."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    """Whether those come around a prompt that stand around every text; true unless given."""
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = False
    """Whether the answer has the tokens as the vocabulary writes them, too."""


class DetokenizeRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Body of /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


Body = TypeVar("Body", bound=msgspec.Struct)


def parse_body(body: Payload, kind: type[Body], known: Known = COMPLETIONS) -> Body:
    """Decodes and checks a body, of an API that knows further fields without serving them.

    Raises:
        ApiError: 400 that names the field: malformed JSON, a wrong type, a missing field, or one
            that is not served; or too many values.
    """
    refuse_many_values(body)
    refuse_large_grammars(body)
    fields = json_object(body)
    refuse_unknown(fields, kind.__struct_fields__, known)
    try:
        return msgspec.convert(fields, kind, str_keys=True)
    except (msgspec.ValidationError, OverflowError) as error:
        raise bad_request(*_explain(fields, kind, error)) from error


def json_object(body: Payload) -> dict[str, Any]:
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
            what, _, where = str(problem).partition(" - at `")
            where = where.removeprefix("$").rstrip("`")
            if where.startswith("key` in"):
                where = _wrong_keys(fields[name], field.type)
            return f"{name}{where}: {what}", name
        except OverflowError as problem:
            return f"{name} holds a number that is too large: {problem}", name
    return str(error), None


def _wrong_keys(value: Mapping[str, Any], kind: Any) -> str:
    """The first keys of an object that cannot be converted, in brackets: a path tells none."""
    wrong = []
    for key, entry in islice(value.items(), MAX_BIASED_TOKENS):
        try:
            msgspec.convert({key: entry}, kind, str_keys=True)
        except (msgspec.ValidationError, OverflowError):
            wrong.append(repr(key[:MAX_SHOWN_CHARACTERS]))
            if len(wrong) == MAX_SHOWN_KEYS:
                break
    return f"[{', '.join(wrong)}]" if wrong else ""
