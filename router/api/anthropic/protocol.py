"""Bodies of /v1/messages and /v1/messages/count_tokens, as in Anthropic's API."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from router.api.openai.fields import KnownFields, UnsupportedField
from router.api.openai.protocol import MAX_CACHE_SALT, MAX_STOP_STRINGS
from worker.protocol.slo import Slo


class ToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`tool_choice`: which tools the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = False


class Thinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`thinking`: whether the model reasons before it answers."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=1024)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`output_config.format`: structured output."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`output_config`: reasoning effort and structured output."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`metadata`: the user of the request."""

    user_id: str | None = None


class ContextEdit(msgspec.Struct, frozen=True):
    """An entry of `context_management.edits`, which is not applied."""

    type: str


class ContextManagement(msgspec.Struct, frozen=True):
    """`context_management`: edits of the conversation, which are not applied."""

    edits: list[ContextEdit] = []


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function that the client runs."""

    name: str
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    input_examples: list[dict[str, Any]] | None = None
    """Examples of arguments, appended to the description."""
    cache_control: dict[str, Any] | None = None
    """Ignored: all prompts are cached."""
    defer_loading: bool | None = None
    """Ignored: the prompt always includes all tools."""
    eager_input_streaming: bool | None = None
    """Ignored: arguments are always streamed."""
    allowed_callers: list[Literal["direct"]] | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Body of /v1/messages/count_tokens: the fields that affect the prompt."""

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Additional variables of the chat template; not in Anthropic's API."""


class MessagesRequest(CountTokensRequest, kw_only=True, frozen=True):
    """Body of /v1/messages."""

    max_tokens: int
    stop_sequences: Annotated[list[str], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    seed: int | None = None
    """Sampling seed. This field and the next ones are not in Anthropic's API; see ChatRequest."""
    priority: Annotated[int, Meta(ge=0, le=9)] | None = None
    slo: Slo | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_CACHE_SALT)] | None = None


CONTEXT_EDITS = ("clear_thinking_", "clear_tool_uses_", "compact_")
"""Prefixes of the known types of context edits. Each type ends with a date."""
SERVER_TOOLS = (
    "advisor_",
    "code_execution_",
    "mcp_toolset",
    "tool_search_tool_",
    "web_fetch_",
    "web_search_",
)
"""Prefixes of the types of tools that Anthropic's servers run."""
CLIENT_TOOLS = ("bash_", "computer_", "memory_", "text_editor_")
"""Prefixes of the types of tools that clients run and whose schemas are built into Anthropic's
models."""
_OF_SERVER = UnsupportedField(([],), "only tools that the client runs are supported: use tools")

KNOWN = KnownFields(
    frozenset(
        (
            "cache_control",
            "diagnostics",
            "inference_geo",
            "service_tier",
            "speed",
            "user_profile_id",
            "workspace_id",
        )
    ),
    MappingProxyType(
        {
            "container": _OF_SERVER,
            "fallbacks": UnsupportedField(([],)),
            "mcp_servers": _OF_SERVER,
            "output_format": UnsupportedField(instead="use output_config.format"),
        }
    ),
)
"""Fields of /v1/messages that are ignored or rejected. `cache_control` is ignored because all
prompts are cached."""
COUNTED = KnownFields(
    KNOWN.ignored
    | frozenset(MessagesRequest.__struct_fields__)
    - frozenset(CountTokensRequest.__struct_fields__),
    KNOWN.unsupported,
)
"""Fields of count_tokens that are ignored or rejected. Fields of MessagesRequest that do not affect
the prompt are ignored."""
