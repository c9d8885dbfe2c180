"""`messages_of`: the items of a Responses API conversation as messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from router.api.openai.messages import TEXT_PARTS, omitted
from router.api.openai.protocol import string_at, wrong_at
from router.api.responses.tools import arguments_of, function_name

ROLES = ("system", "developer", "user", "assistant")
_OUTPUT = "_output"
"""Suffix of item types that hold the result of a call."""
_CALL = "_call"
"""Suffix of item types that hold a call."""
_NOT_ARGUMENTS = ("type", "id", "call_id", "name", "namespace", "status")
"""Fields that are not arguments of the tool, in calls other than function calls."""

Messages = list[dict[str, Any]]


def messages_of(given: str | Sequence[Mapping[str, Any]]) -> Messages:
    """The messages of `input`; reasoning, text and calls of a turn become one assistant message.

    Calls of any tool that the client runs, and their results, become function calls and results.
    Items of other types, such as searches by another server, become a note.

    Raises:
        ApiError: 400 if an item is malformed, or refers to one that is not in the input.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}] if given else []
    items = _Items()
    for index, item in enumerate(given):
        items.add(f"input[{index}]", item)
    items.add_notes()
    return items.messages


class _Items:
    """The messages of the items added so far."""

    def __init__(self) -> None:
        self.messages: Messages = []
        self._notes: list[str] = []
        """Notes with which the next assistant message will begin."""

    def add(self, where: str, item: Mapping[str, Any]) -> None:
        """Adds an item; `where` is its path. Raises ApiError (400)."""
        kind = item.get("type", "message")
        if not isinstance(kind, str):
            raise wrong_at(f"{where}.type", "must be a string")
        if kind == "message":
            self._add_message(where, item)
        elif kind == "reasoning":
            thought = _thought(where, item)
            if thought:
                self.add_notes()
                new = {"role": "assistant", "content": "", "reasoning": thought}
                self.messages.append(new)
        elif kind == "item_reference":
            raise wrong_at(f"{where}.type", "item_reference is not supported: send the item itself")
        elif kind.endswith(_OUTPUT):
            self._add_result(where, item)
        elif kind.endswith(_CALL) and (kind == "function_call" or "call_id" in item):
            self._add_call(where, kind, item)
        else:
            self._notes.append(omitted(kind))

    def add_notes(self) -> None:
        """Adds an assistant message with the notes that no assistant message contains yet."""
        if self._notes:
            self.messages.append({"role": "assistant", "content": "\n".join(self._notes)})
            self._notes = []

    def _add_message(self, where: str, item: Mapping[str, Any]) -> None:
        role, text = item.get("role"), _text(f"{where}.content", item.get("content"))
        if role not in ROLES:
            raise wrong_at(f"{where}.role", f"must be one of {', '.join(ROLES)}")
        if role == "assistant":
            text = "\n".join([*self._notes, text])
            self._notes = []
        self.add_notes()
        last = self.messages[-1] if self.messages else None
        if role == "assistant" and last is not None and _is_begun(last) and not last["content"]:
            last["content"] = text
        else:
            self.messages.append({"role": role, "content": text})

    def _add_call(self, where: str, kind: str, item: Mapping[str, Any]) -> None:
        self.add_notes()
        if kind in ("function_call", "custom_tool_call"):
            name = string_at(f"{where}.name", item.get("name"))
            if isinstance(namespace := item.get("namespace"), str):
                name = function_name(namespace, name)
        else:
            name = kind.removesuffix(_CALL)
        if kind == "function_call":
            arguments = string_at(f"{where}.arguments", item.get("arguments", ""))
        elif kind == "custom_tool_call":
            arguments = arguments_of(string_at(f"{where}.input", item.get("input", "")))
        else:
            rest = {key: value for key, value in item.items() if key not in _NOT_ARGUMENTS}
            arguments = msgspec.json.encode(rest).decode()
        call = {
            "id": string_at(f"{where}.call_id", item.get("call_id")),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        self.messages[-1].setdefault("tool_calls", []).append(call)

    def _add_result(self, where: str, item: Mapping[str, Any]) -> None:
        self.add_notes()
        call_id = string_at(f"{where}.call_id", item.get("call_id", item.get("id")))
        # Results of tool searches are in `tools`.
        text = _result(f"{where}.output", item.get("output", item.get("tools")))
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})


def _is_begun(message: Mapping[str, Any]) -> bool:
    """Whether the message is an assistant message that can still get text: it has no calls."""
    return message["role"] == "assistant" and "tool_calls" not in message


def _thought(where: str, item: Mapping[str, Any]) -> str:
    """Text of a reasoning item, or its summary; empty if the item only has encrypted content."""
    for name in ("content", "summary"):
        parts = item.get(name)
        if parts is not None and not isinstance(parts, list):
            raise wrong_at(f"{where}.{name}", "must be a list")
        texts = [part.get("text") if isinstance(part, dict) else None for part in parts or ()]
        if texts:
            return "\n".join(string_at(f"{where}.{name}", text) for text in texts)
    return ""


def _result(where: str, output: Any) -> str:
    """Text of a call's result: a text, content parts or, for other kinds of tools, any JSON."""
    if output is None:
        raise wrong_at(where, "is missing")
    has_parts = isinstance(output, list) and all(
        isinstance(part, dict) and part.get("type") != "function" and "type" in part
        for part in output
    )
    if isinstance(output, str) or has_parts:
        return _text(where, output)
    return msgspec.json.encode(output).decode()


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong_at(where, "must be a string or a list of content parts")
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise wrong_at(f"{where}[{place}]", "must be an object with a type")
        field = TEXT_PARTS.get(kind)
        if field is None:
            texts.append(omitted(kind))
        else:
            texts.append(string_at(f"{where}[{place}].{field}", part.get(field)))
    return "\n".join(texts)
