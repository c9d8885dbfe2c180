"""Converts bodies of the Responses API to bodies of chat completions: items become messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from router.api.openai.messages import LEADING
from router.api.openai.protocol import ChatRequest, ReasoningOptions
from router.api.openai.tools import unavailable_tools
from router.api.responses.items import Messages
from router.api.responses.protocol import LOGPROBS, ResponsesRequest, TextFormat
from router.api.responses.tools import ClientTools
from router.errors import bad_request

NAMES: Mapping[str, str] = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "response_format": "text.format",
    "structured_outputs": "text.format",
}
"""The Responses API's field names by ChatRequest field, for fields whose names differ."""
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
)
"""Fields that are copied to the ChatRequest field of the same name."""


def chat_of(body: ResponsesRequest, messages: Messages, tools: ClientTools) -> ChatRequest:
    """Converts a body of /v1/responses to a chat. Raises ApiError (400) if it is malformed.

    Args:
        messages: messages of the conversation, including those of `input`, without
            `instructions`.
        tools: the tools of the body.
    """
    leading = [body.instructions or "", unavailable_tools(tools.unavailable)]
    system = "\n\n".join(filter(None, leading))
    instructions = [{"role": "system", "content": system}] if system else []
    text, forced = body.text, tools.forced_grammar(body.tool_choice)
    num_top = body.top_logprobs
    has_logprobs = bool(num_top) or LOGPROBS in (body.include or ())
    return ChatRequest(
        model=body.model,
        messages=[*instructions, *messages],
        max_completion_tokens=body.max_output_tokens,
        tools=tools.functions or None,
        tool_choice=tools.choice(body.tool_choice) if forced is None else "auto",
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=(
            None if text is None or text.format is None or forced else _form(text.format)
        ),
        structured_outputs=None if forced is None else {"grammar": forced.grammar},
        # Clients send an effort for any model.
        reasoning=(
            None if body.reasoning is None else ReasoningOptions(effort=body.reasoning.effort)
        ),
        logprobs=has_logprobs,
        top_logprobs=num_top if has_logprobs else None,
        stream=bool(body.stream),
        prompt_cache_key=body.prompt_cache_key,
        user=body.user,
        priority=body.priority,
        slo=body.slo,
        cache_salt=body.cache_salt,
        chat_template_kwargs=body.chat_template_kwargs,
        **{name: getattr(body, name) for name in SAMPLING},
    )


class Turns:
    """The turns of a chat; the first ones can be dropped.

    A turn starts with a user message; system messages are always kept.
    """

    def __init__(self, chat: ChatRequest) -> None:
        self._chat = chat
        self._system = [m for m in chat.messages if m["role"] in LEADING]
        self._others = [m for m in chat.messages if m["role"] not in LEADING]
        self._starts = [i for i, m in enumerate(self._others) if m["role"] == "user"]

    def __len__(self) -> int:
        """Number of turns; at least 1."""
        return max(len(self._starts), 1)

    def without(self, number: int) -> ChatRequest:
        """The chat without its first `number` turns, in time linear in the size of the rest."""
        if not number:
            return self._chat
        messages = [*self._system, *self._others[self._starts[number] :]]
        return msgspec.structs.replace(self._chat, messages=messages)


def _form(form: TextFormat) -> dict[str, Any]:
    if form.type != "json_schema":
        return {"type": form.type}
    if form.schema is None or form.name is None:
        raise bad_request("text.format of type json_schema requires name and schema", "text")
    return {"type": "json_schema", "json_schema": {"name": form.name, "schema": form.schema}}
