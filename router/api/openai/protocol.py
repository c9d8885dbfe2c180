"""Request bodies of the API: OpenAI's fields, and vLLM's extra parameters."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from router.api.http.body import Payload
from router.api.openai.fields import (
    COMPLETIONS,
    Ignored,
    KnownFields,
    check_supported,
    without_unknown,
)
from router.api.openai.long_strings import CutJson
from router.api.openai.structured import check_grammar_sizes
from router.api.openai.values import check_num_values
from router.errors import ApiError, bad_request
from worker.protocol.analyzed import analyzed
from worker.protocol.sampling import (
    MAX_LOGIT_BIASES,
    MAX_LOGPROB_TOKENS,
    MAX_LOGPROBS,
    MAX_TOKEN_ID,
)
from worker.protocol.slo import Slo

MAX_CHOICES = 128
MAX_STOP_STRINGS = 128
MAX_STOP_TOKENS = 1024
MAX_BAD_WORDS = 256
MAX_CACHE_SALT = 1024
"""Maximum length of a cache salt in characters."""
MAX_SHOWN_KEYS = 8
"""Maximum number of invalid keys of an object that an error names."""
MAX_SHOWN_CHARACTERS = 64
"""Maximum number of characters of each key that an error quotes."""

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
LogitBias = Annotated[dict[TokenId, float], Meta(max_length=MAX_LOGIT_BIASES)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a stream (OpenAI's `stream_options`)."""

    include_usage: bool | None = False
    """Whether an additional last chunk has the token counts."""
    continuous_usage_stats: bool | None = False
    """Whether every chunk has the token counts so far; requires `include_usage`."""
    include_obfuscation: bool | None = False
    """Ignored: OpenAI pads chunks against attackers who observe encrypted lengths."""


class ReasoningOptions(msgspec.Struct, frozen=True):
    """`reasoning` of a chat, as in OpenRouter's API: ignored if the chat template does not support
    reasoning. Its other fields, such as a maximum number of tokens, are ignored."""

    effort: Effort | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    """Whether responses omit the reasoning."""


class CommonRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Fields that /v1/chat/completions and /v1/completions have in common.

    None means the default, since many clients send null. SamplingParams validates the values of
    its fields; only the gateway's own limits are checked here.
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
    logprob_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_LOGPROB_TOKENS)] | None = None
    """Ids of the tokens whose log-probabilities are reported, instead of the most likely tokens."""
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool | None = False
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = True
    cache_salt: Annotated[str, Meta(max_length=MAX_CACHE_SALT)] | None = None
    prompt_cache_key: str | None = None
    """Conversation id for the session gate and the session routing policy, unless a header or
    `user` has one."""
    priority: Annotated[int, Meta(ge=0, le=9)] | None = None
    slo: Slo | None = None
    user: str | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    """Whether log-probabilities name tokens as `token_id:ID`."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Maximum number of prompt tokens; longer prompts keep their last tokens."""
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    diffusion: dict[str, Any] | None = None
    """Parameters of block diffusion models (see worker.protocol.diffusion)."""


class ChatRequest(CommonRequest, kw_only=True, frozen=True):
    """Body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    """Whether the prompt ends with the start of an assistant message; defaults to the opposite of
    `continue_final_message`."""
    continue_final_message: bool | None = False
    """Whether the model continues the last message instead of answering it."""
    documents: list[dict[str, Any]] | None = None
    """Documents that the chat template may include in the prompt."""
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    """Reasoning effort, if the chat template supports it."""
    reasoning: ReasoningOptions | None = None
    enable_thinking: bool | None = None
    """Whether the model reasons, as in Qwen's API; ignored if the template does not support it."""
    thinking: bool | dict[str, Any] | None = None
    """Alternative to `enable_thinking`, as in the APIs of DeepSeek, Z.ai and Moonshot:
    `{"type": "enabled"}`."""
    include_reasoning: bool | None = True
    """Whether responses include the reasoning."""
    thinking_token_budget: Annotated[int, Meta(ge=0)] | None = None
    """Maximum number of reasoning tokens, after which reasoning is ended; None if there is no
    maximum."""
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(CommonRequest, kw_only=True, frozen=True):
    """Body of /v1/completions."""

    prompt: str | list[Any]
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    add_special_tokens: bool | None = True
    logprobs: int | None = None
    echo: bool | None = False


class TokenizeRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Body of /tokenize: a prompt or a chat."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    """Whether to add the tokenizer's special tokens (default: true)."""
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = False
    """Whether the response also includes each token as its string in the vocabulary."""


class DetokenizeRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Body of /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


class LoadAdapterRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Body of /v1/load_lora_adapter, as in vLLM."""

    lora_name: Annotated[str, msgspec.Meta(min_length=1)]
    """Model name of requests that use the adapter."""
    lora_path: Annotated[str, msgspec.Meta(min_length=1)]
    """Folder with the adapter on the workers' nodes."""
    load_inplace: bool = False
    """Whether to replace a loaded adapter of this name."""
    model: str | None = None
    """Base model; required only if several models have adapters."""


class UnloadAdapterRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Body of /v1/unload_lora_adapter, as in vLLM."""

    lora_name: Annotated[str, msgspec.Meta(min_length=1)]
    lora_int_id: int | None = None
    """Ignored: adapters are identified by name."""
    model: str | None = None
    """Base model; required only if several models have adapters."""


Body = TypeVar("Body", bound=msgspec.Struct)


def parse_body(
    body: Payload,
    kind: type[Body],
    known: KnownFields = COMPLETIONS,
    ignored: Ignored | None = None,
) -> Body:
    """Decodes and validates a body.

    Args:
        body: JSON.
        kind: type of the body.
        known: additional fields of the API that are not supported.
        ignored: handling of unknown fields; None rejects them.

    Raises:
        ApiError: 400 for malformed JSON, too many values, or a field that is missing,
            unsupported or of the wrong type; the error names the field.
    """
    text = CutJson(body)
    check_num_values(text.skeleton)
    check_grammar_sizes(text)
    fields = json_object(text)
    check_supported(fields, kind.__struct_fields__, known, ignored)
    if ignored is not None and ignored.is_beta:
        supported = {name: fields[name] for name in kind.__struct_fields__ if name in fields}
        fields = without_unknown(supported, kind, ignored)
    try:
        return msgspec.convert(fields, analyzed(kind), str_keys=True)
    except (msgspec.ValidationError, OverflowError) as error:
        raise bad_request(*_explain(fields, kind, error)) from error


def json_object(body: CutJson) -> dict[str, Any]:
    """Decodes a body that must be a JSON object. Raises ApiError (400) if it is not."""
    try:
        fields = body.decode()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"the body is not valid JSON: {error}") from error
    except RecursionError:
        raise bad_request("the body is nested too deeply: simplify it") from None
    if not isinstance(fields, dict):
        raise bad_request("the body must be a JSON object")
    return fields


def wrong_at(where: str, problem: str) -> ApiError:
    """A 400 error for an invalid value within a body.

    Args:
        where: path of the value, such as `input[2].role`.
        problem: description of the problem, without the path.
    """
    return bad_request(f"{where} {problem}", where.partition("[")[0].partition(".")[0])


def string_at(where: str, value: Any) -> str:
    """A value within a body that must be a string. Raises ApiError (400; see `wrong_at`)."""
    if not isinstance(value, str):
        raise wrong_at(where, "must be a string")
    return value


def _explain(
    fields: Mapping[str, Any], kind: type[msgspec.Struct], error: Exception
) -> tuple[str, str | None]:
    """Message and name of the first field that is missing or cannot be converted to `kind`."""
    for field in msgspec.structs.fields(kind):
        name = field.encode_name
        if name not in fields:
            if field.required:
                return f"{name} is missing", name
            continue
        try:
            msgspec.convert(fields[name], analyzed(field.type), str_keys=True)
        except msgspec.ValidationError as problem:
            # msgspec puts the location within the field last; errors start with it.
            what, _, where = str(problem).partition(" - at `")
            where = where.removeprefix("$").rstrip("`")
            if where.startswith("key` in"):
                where = _wrong_keys(fields[name], field.type)
            return f"{name}{where}: {what}", name
        except OverflowError as problem:
            return f"{name} contains a number that is too large: {problem}", name
    return str(error), None


def _wrong_keys(value: Mapping[str, Any], kind: Any) -> str:
    """The first invalid keys of an object, which msgspec's error does not name."""
    wrong = []
    for key, entry in islice(value.items(), MAX_LOGIT_BIASES):
        try:
            msgspec.convert({key: entry}, analyzed(kind), str_keys=True)
        except (msgspec.ValidationError, OverflowError):
            wrong.append(repr(key[:MAX_SHOWN_CHARACTERS]))
            if len(wrong) == MAX_SHOWN_KEYS:
                break
    return f"[{', '.join(wrong)}]" if wrong else ""
