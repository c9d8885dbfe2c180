"""Converts bodies of the Responses API to bodies of chat completions: items become messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from router.api.openai.messages import LEADING, TEXT_PARTS
from router.api.openai.protocol import ChatRequest, string_at, wrong_at
from router.api.openai.tools import function_tool, given_tool
from router.api.responses.protocol import LOGPROBS, FunctionTool, ResponsesRequest, TextFormat
from router.errors import bad_request

NAMES: Mapping[str, str] = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "structured_outputs": "text.format",
}
"""This API's name of each ChatRequest field that is named differently here."""
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
"""Fields that ChatRequest has under the same name."""
ROLES = ("system", "developer", "user", "assistant")

Messages = list[dict[str, Any]]


def chat_of(body: ResponsesRequest, messages: Messages) -> ChatRequest:
    """Converts a body of /v1/responses to a chat. Raises ApiError (400) if it is malformed.

    Args:
        body: the body.
        messages: messages of the conversation, including those of `input`, without
            `instructions`.
    """
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    text = body.text
    num_top = body.top_logprobs
    has_logprobs = bool(num_top) or LOGPROBS in (body.include or ())
    return ChatRequest(
        model=body.model,
        messages=[*instructions, *messages],
        max_completion_tokens=body.max_output_tokens,
        tools=None if body.tools is None else [_tool(i, t) for i, t in enumerate(body.tools)],
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=None if text is None or text.format is None else _form(text.format),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
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

    Args:
        chat: the chat.
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


def messages_of(given: str | Sequence[Mapping[str, Any]]) -> Messages:
    """The messages of `input`; reasoning, text and calls of a turn become one assistant message.

    Raises:
        ApiError: 400 if an item is malformed or of an unsupported type.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}] if given else []
    messages: Messages = []
    for index, item in enumerate(given):
        kind = item.get("type", "message")
        where = f"input[{index}]"
        if kind == "message":
            _add_message(messages, where, item)
        elif kind == "reasoning":
            thought = _thought(where, item)
            if thought:
                messages.append({"role": "assistant", "content": "", "reasoning": thought})
        elif kind == "function_call":
            _add_call(messages, where, item)
        elif kind == "function_call_output":
            call_id = string_at(f"{where}.call_id", item.get("call_id"))
            text = _text(f"{where}.output", item.get("output"))
            messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
        else:
            raise wrong_at(f"{where}.type", f"{str(kind)[:64]} is not supported")
    return messages


def _add_message(messages: Messages, where: str, item: Mapping[str, Any]) -> None:
    role, text = item.get("role"), _text(f"{where}.content", item.get("content"))
    if role not in ROLES:
        raise wrong_at(f"{where}.role", f"must be one of {', '.join(ROLES)}")
    last = messages[-1] if messages else None
    if role == "assistant" and last is not None and _is_begun(last) and not last["content"]:
        last["content"] = text
    else:
        messages.append({"role": role, "content": text})


def _add_call(messages: Messages, where: str, item: Mapping[str, Any]) -> None:
    arguments = item.get("arguments", "")
    call = {
        "id": string_at(f"{where}.call_id", item.get("call_id")),
        "type": "function",
        "function": {
            "name": string_at(f"{where}.name", item.get("name")),
            "arguments": string_at(f"{where}.arguments", arguments),
        },
    }
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append(call)


def _is_begun(message: Mapping[str, Any]) -> bool:
    """Whether the message is an assistant message without calls."""
    return message["role"] == "assistant" and "tool_calls" not in message


def _thought(where: str, item: Mapping[str, Any]) -> str:
    """Text of a reasoning item, or its summary; empty if it is only present encrypted."""
    for name in ("content", "summary"):
        parts = item.get(name)
        if parts is not None and not isinstance(parts, list):
            raise wrong_at(f"{where}.{name}", "must be a list")
        texts = [part.get("text") if isinstance(part, dict) else None for part in parts or ()]
        if texts:
            return "\n".join(string_at(f"{where}.{name}", text) for text in texts)
    return ""


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong_at(where, "must be a string or a list of content parts")
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        field = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if field is None:
            what = f"{str(kind)[:64]} is not supported: use text"
            raise wrong_at(f"{where}[{place}].type", what)
        texts.append(string_at(f"{where}[{place}].{field}", part.get(field)))
    return "\n".join(texts)


def _tool(index: int, given: Mapping[str, Any]) -> dict[str, Any]:
    kind = given.get("type")
    if kind != "function":
        raise bad_request(
            f"tools[{index}].type {str(kind)[:64]} is not supported: only tools that the client "
            "runs are (type function)",
            "tools",
        )
    tool = given_tool(index, given, FunctionTool)
    return function_tool(tool.name, tool.description, tool.parameters, tool.strict)


def _choice(choice: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    """Converts `tool_choice` to that of chats, which nests the function's name one level deeper."""
    if choice is None or isinstance(choice, str):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        named = [_choice(tool) for tool in tools] if isinstance(tools, list) else tools
        allowed = {"mode": choice.get("mode"), "tools": named}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    raise bad_request(
        'tool_choice must be "auto", "none", "required", {"type": "function", "name"} or '
        '{"type": "allowed_tools", "mode", "tools"}',
        "tool_choice",
    )


def _form(form: TextFormat) -> dict[str, Any]:
    if form.type != "json_schema":
        return {"type": form.type}
    if form.schema is None or form.name is None:
        raise bad_request("text.format of type json_schema must have name and schema", "text")
    return {"type": "json_schema", "json_schema": {"name": form.name, "schema": form.schema}}
