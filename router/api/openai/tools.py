"""ToolUse: functions that the model of a chat may or must call. OutputParsing: how its output is
parsed."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from router.api.openai.fields import Ignored, without_unknown
from router.api.openai.protocol import ChatRequest
from router.errors import ApiError, bad_request
from router.parsers import (
    Dialect,
    HarmonyParser,
    OutputParser,
    Piece,
    Properties,
    Thought,
    ToolFormat,
    num_thought_tokens,
)
from worker.protocol.analyzed import analyzed
from worker.protocol.argument_types import argument_types
from worker.protocol.structured import StructuredOutputsParams
from worker.protocol.text.chat_template import ChatTemplate
from worker.protocol.text.tokenizer import Tokenizer

T = TypeVar("T", bound=msgspec.Struct)

_SHORT_ID = string.ascii_letters + string.digits
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolUse:
    """Tools that the model may or must call in one chat, and the format of its calls."""

    tools: Sequence[Mapping[str, Any]] | None = None
    """Tools passed to the chat template; None if there are none."""
    format: ToolFormat | None = None
    """Format in which the model writes calls; None if it may not call anything."""
    properties: Properties = field(default_factory=dict)
    """Argument types (`argument_types`) by function and argument."""
    form: StructuredOutputsParams | None = None
    """Structured output that enforces valid calls; None for free text."""
    is_forced: bool = False
    """Whether `form` allows only calls."""
    is_named: bool = False
    """Whether the client named the function to call; the finish reason is then not tool_calls."""
    single_call: bool = False
    """Whether the model may make only one call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputParsing:
    """How reasoning and tool calls are parsed in the completions of one chat."""

    dialect: Dialect
    """Format of reasoning and tool calls."""
    use: ToolUse
    is_thinking: bool
    """Whether the prompt ends within reasoning or, in the harmony format, at the start of a header.
    """
    shows_thoughts: bool = True
    """Whether responses include the reasoning."""

    def new_parser(self) -> OutputParser | HarmonyParser:
        """Creates a parser for one completion."""
        return self.dialect.new_parser(
            tools=self.use.format,
            is_thinking=self.is_thinking,
            properties=self.use.properties,
            single_call=self.use.single_call,
        )

    def pieces(
        self, parser: OutputParser | HarmonyParser, text: str, *, is_end: bool
    ) -> Iterator[Piece]:
        """The pieces of new text that are visible to the client.

        Args:
            parser: parser of the completion.
            text: new text of the completion.
            is_end: whether the completion ends with this text.
        """
        pieces = parser.push(text)
        if is_end:
            pieces += parser.end()
        return (p for p in pieces if self.shows_thoughts or not isinstance(p, Thought))

    def num_thought_tokens(self, tokenizer: Tokenizer, token_ids: Sequence[int]) -> int:
        """Number of reasoning tokens: those up to the marker that ends reasoning, or all tokens if
        there is no marker."""
        if self.dialect.is_harmony:
            return num_thought_tokens(tokenizer, token_ids)
        thoughts = self.dialect.thoughts
        end = None if thoughts is None else tokenizer.token_id(thoughts.closing)
        if end is not None and end in token_ids:
            return token_ids.index(end)
        return len(token_ids)


def tool_use(body: ChatRequest, dialect: Dialect, template: ChatTemplate | None) -> ToolUse:
    """Parses `tools`, `tool_choice` and `parallel_tool_calls` of a body.

    Raises:
        ApiError: 400 if a field is malformed, the fields contradict each other, or the model does
            not support tools.
    """
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none"):
            raise bad_request("tool_choice is only allowed when tools are specified", "tool_choice")
        return ToolUse()
    functions = _functions(body.tools)
    choice, names = _choice(choice, functions)
    if choice == "none":
        return ToolUse()
    if template is None or not template.reads("tools"):
        raise bad_request("this model's chat template does not support tools: omit them", "tools")
    if dialect.tools is None:
        raise bad_request(
            "tool calls are disabled on this server (--tool-call-parser none): omit tools",
            "tools",
        )
    allowed = frozenset(names)
    tools = [tool for tool in body.tools if tool["function"]["name"] in allowed]
    is_named = choice == "named"
    single_call = is_named or body.parallel_tool_calls is False
    properties = {name: argument_types(functions[name].get("parameters") or {}) for name in names}
    if choice == "auto":
        strict = any(functions[name].get("strict") is True for name in names)
        return ToolUse(
            tools=tools,
            format=dialect.tools,
            properties=properties,
            form=_strict_form(functions, names, dialect, single_call=single_call)
            if strict
            else None,
            single_call=single_call,
        )
    schemas = {name: _schema(functions[name]) for name in names}
    return ToolUse(
        # The prompt has all functions, not only the named one, so that its cached prefix is reused.
        tools=body.tools if is_named else tools,
        format=dialect.forced,
        properties=properties,
        form=_form(dialect.forced.calls_tag(schemas, single_call=single_call)),
        is_forced=True,
        is_named=is_named,
        single_call=single_call,
    )


def _strict_form(
    functions: Mapping[str, Mapping[str, Any]],
    names: Sequence[str],
    dialect: Dialect,
    *,
    single_call: bool,
) -> StructuredOutputsParams | None:
    """Structured output for free text in which calls of strict functions match their schemas; None
    if a grammar cannot distinguish the model's calls from text."""
    if dialect.tools is not dialect.forced:
        return None
    schemas = {
        name: _schema(functions[name]) if functions[name].get("strict") else {"type": "object"}
        for name in names
    }
    tag = dialect.forced.free_text_tag(schemas, single_call=single_call)
    return None if tag is None else _form(tag)


def _form(tag: Mapping[str, Any]) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(structural_tag=dict(tag))
    except ValueError as error:
        raise bad_request(f"tools: {error}", "tools") from error


def given_tool(index: int, given: Mapping[str, Any], kind: type[T], ignored: Ignored) -> T:
    """Converts a tool from another API's body to `kind`. Raises ApiError (400) if that fails.

    Args:
        index: index of the tool in the body.
        given: the tool.
        kind: type of the tool.
        ignored: handling of unknown fields.
    """
    if ignored.is_beta:
        given = without_unknown(given, kind, ignored, "tools.")
    try:
        return msgspec.convert(given, analyzed(kind))
    except msgspec.ValidationError as error:
        raise bad_request(f"tools[{index}]: {error}", "tools") from error


def unavailable_tools(names: Sequence[str]) -> str:
    """A note for the system message about tools that this server cannot run; empty if there are
    none.

    Without it, a model may invent the results of a requested search.
    """
    shown = [name for name in dict.fromkeys(names) if _NAME.fullmatch(name)]
    return f"Tools that are not available: {', '.join(shown)}." if shown else ""


def function_tool(
    name: str, description: str | None, parameters: Mapping[str, Any] | None, strict: bool | None
) -> dict[str, Any]:
    """A function in the format of the `tools` of a chat; fields that are None are omitted."""
    function = {
        "name": name,
        "description": description,
        "parameters": parameters,
        "strict": strict,
    }
    given_alone = {field: value for field, value in function.items() if value is not None}
    return {"type": "function", "function": given_alone}


def new_call_id(dialect: Dialect) -> str:
    """A new tool call id in the format that the model's chat template supports."""
    if dialect.call_ids == "short":
        return "".join(secrets.choice(_SHORT_ID) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


def _functions(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    functions: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise _wrong(index, "must have type: function and a function object")
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise _wrong(index, "function.name must be 1 to 128 letters, digits, _, . or -")
        if name in functions:
            raise _wrong(index, f"function.name {name} is not unique")
        if parameters is not None and not isinstance(parameters, dict):
            raise _wrong(index, "function.parameters must be a JSON schema")
        functions[name] = function
    return functions


def _choice(
    choice: str | Mapping[str, Any] | None, functions: Mapping[str, Any]
) -> tuple[str, list[str]]:
    """The kind of choice (auto, none, required or named), and the functions that may be called."""
    if choice is None:
        return "auto", list(functions)
    if isinstance(choice, str):
        if choice in ("auto", "none", "required"):
            return choice, list(functions)
    elif choice.get("type") == "function":
        return "named", [_named_function(choice.get("function"), functions)]
    elif choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        mode = allowed.get("mode") if isinstance(allowed, dict) else None
        entries = allowed.get("tools") if isinstance(allowed, dict) else None
        if mode in ("auto", "required") and isinstance(entries, list) and entries:
            given = [
                entry.get("function") if isinstance(entry, dict) else None for entry in entries
            ]
            return mode, list(
                dict.fromkeys(_named_function(function, functions) for function in given)
            )
    raise bad_request(
        'tool_choice must be "auto", "none", "required", an object of type "function" with '
        'function.name, or one of type "allowed_tools" with allowed_tools.mode and .tools',
        "tool_choice",
    )


def _named_function(function: Any, functions: Mapping[str, Any]) -> str:
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise bad_request("tool_choice must name a function (function.name)", "tool_choice")
    if name not in functions:
        raise bad_request(f"tool_choice: function {name!r:.200} is not in tools", "tool_choice")
    return name


def _schema(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """JSON schema of the arguments; allows any object for `strict: false` or without parameters."""
    parameters = function.get("parameters")
    if not parameters or function.get("strict") is False:
        return {"type": "object"}
    return {"type": "object", **parameters}


def _wrong(index: int, what: str) -> ApiError:
    return bad_request(f"tools[{index}] {what}", "tools")
