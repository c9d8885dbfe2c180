"""Bodies of /v1/messages and /v1/messages/count_tokens, in Anthropic's names."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from router.api.fields import Known, Refused
from router.api.protocol import MAX_CACHE_SALT, MAX_STOP_STRINGS
from worker.wire.slo import Slo


class ToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which of the tools are to be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = False


class Thinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=1024)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much work goes into the answer, and what form it has."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The user whom the request is for."""

    user_id: str | None = None


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function that the client runs."""

    name: str
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    input_examples: list[dict[str, Any]] | None = None
    """The model is shown them behind the description."""
    cache_control: dict[str, Any] | None = None
    """No effect, as the next: all prompts are cached, and no tool is loaded later."""
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Body of /v1/messages/count_tokens: what makes a prompt."""

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Ours, for the chat template."""


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
    """Ours, as those below: they are as in chats."""
    priority: Annotated[int, Meta(ge=0, le=9)] | None = None
    slo: Slo | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_CACHE_SALT)] | None = None


_OF_SERVER = Refused(([],), "tools run at the client: use tools")

KNOWN = Known(
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
            "context_management": Refused(
                (
                    {},
                    {"edits": []},
                    {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
                ),
                "send the messages that the model shall see",
            ),
            "fallbacks": Refused(([],)),
            "mcp_servers": _OF_SERVER,
            "output_format": Refused(instead="use output_config.format"),
        }
    ),
)
"""Other fields that Anthropic's bodies may have. Prompts are always cached: nothing says which."""
COUNTED = Known(
    KNOWN.ignored
    | frozenset(MessagesRequest.__struct_fields__)
    - frozenset(CountTokensRequest.__struct_fields__),
    KNOWN.refused,
)
"""Other fields that bodies of count_tokens may have: those that make no prompt."""
