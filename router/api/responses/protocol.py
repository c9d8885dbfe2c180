"""ResponsesRequest: the body of /v1/responses, as in OpenAI's API."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from router.api.openai.fields import KnownFields, UnsupportedField
from router.api.openai.protocol import MAX_CACHE_SALT, Effort, LogitBias
from worker.protocol.sampling import MAX_LOGPROBS
from worker.protocol.slo import Slo

MAX_METADATA = 16
LOGPROBS = "message.output_text.logprobs"
"""Value of `include` that requests log-probabilities."""

Included = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`text.format`: structured output."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`text`: options of the output text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Ignored: no served model supports it."""


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`reasoning`: the effort. Other fields are ignored: reasoning is always returned in full."""

    effort: Effort | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class FunctionTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function that the client runs."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    """Ignored, like the fields below: all tools are always in the prompt, and only the model can
    call them."""
    output_schema: dict[str, Any] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    run_async: Literal[False] | None = msgspec.field(default=None, name="async")


class CustomFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`format` of a custom tool: its input is free text, or matches a grammar."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool that the client runs on a text instead of JSON arguments."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: CustomFormat | None = None
    defer_loading: bool | None = None
    """Ignored, like the fields below: all tools are always in the prompt, and only the model can
    call them."""
    allowed_callers: list[Literal["direct"]] | None = None
    run_async: Literal[False] | None = msgspec.field(default=None, name="async")


class ResponsesRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Body of /v1/responses. None means the default."""

    model: str | None = None
    input: str | list[dict[str, Any]] = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[Included] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: (
        Annotated[
            dict[
                Annotated[str, Meta(max_length=64)],
                Annotated[str, Meta(max_length=512)],
            ],
            Meta(max_length=MAX_METADATA),
        ]
        | None
    ) = None
    store: bool | None = True
    background: bool | None = False
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    """Ignored: streams have no padding, and always include the token counts."""
    prompt_cache_key: str | None = None
    user: str | None = None
    top_k: int | None = None
    """Number of most likely tokens to sample from. Like the ChatRequest fields below, it is not in
    OpenAI's API."""
    min_p: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: LogitBias | None = None
    priority: Annotated[int, Meta(ge=0, le=9)] | None = None
    slo: Slo | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_CACHE_SALT)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_OTHERS = {
    "image": UnsupportedField(({},), "only text is supported"),
    "conversation": UnsupportedField(instead="use previous_response_id"),
    "max_tokens": UnsupportedField(instead="use max_output_tokens"),
    "messages": UnsupportedField(instead="use input, or /v1/chat/completions"),
    "moderation": UnsupportedField(),
    "n": UnsupportedField((1,)),
    "prompt": UnsupportedField(instead="put the prompt into input"),
    "reasoning_effort": UnsupportedField(instead="use reasoning.effort"),
    "response_format": UnsupportedField(instead="use text.format"),
    "stop": UnsupportedField(([],), "use /v1/chat/completions"),
    "structured_outputs": UnsupportedField(instead="use text.format"),
}
KNOWN = KnownFields(
    frozenset(
        (
            "access_programs",
            "client_metadata",
            "context_management",  # not applied: clients compact if the context length is exceeded
            "max_tool_calls",  # for built-in tools, which are not supported
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
        )
    ),
    MappingProxyType(_OTHERS),
)
"""Fields of /v1/responses that are ignored or rejected."""
