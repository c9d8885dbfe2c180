"""ClientTools: `tools` of the Responses API as functions of a chat."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from router.api.openai.fields import Ignored
from router.api.openai.protocol import wrong_at
from router.api.openai.tools import function_tool, given_tool
from router.api.responses.protocol import CustomTool, FunctionTool
from router.errors import bad_request
from router.parsers import mended

INPUT = "input"
"""Name of the argument that contains the free text of a custom tool's call."""
BEGUN = '{"input":"'
"""Start of the arguments of a custom tool's call."""
_CHARACTERS = re.compile(r'(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*+')
"""Pattern that matches the complete characters of a JSON string up to its end or the cut."""
_HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}$")
"""First half of a surrogate pair whose other half has not arrived."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientTool:
    """A tool as the client named it."""

    kind: Literal["function", "custom"]
    name: str
    namespace: str | None = None
    """The namespace that contains the tool; None if there is none."""
    grammar: str | None = None
    """Lark grammar of a custom tool's input; None for free text and regular expressions."""


@dataclass(kw_only=True, slots=True)
class ClientTools:
    """The tools of a request."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    """The tools as functions in the format of chat completions."""
    by_name: dict[str, ClientTool] = field(default_factory=dict)
    """The client's tools by function name."""
    unavailable: list[str] = field(default_factory=list)
    """Types of tools that only other servers run."""

    def choice(self, choice: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
        """`tool_choice` in the format of chat completions. Raises ApiError (400) if it is
        malformed."""
        if isinstance(choice, str) or choice is None:
            has_choice = bool(self.functions) or not (self.unavailable or choice == "auto")
            return choice if has_choice else None
        if choice.get("type") == "allowed_tools":
            return self._allowed(choice)
        name = self._named(choice)
        if name is not None:
            return {"type": "function", "function": {"name": name}}
        return "auto" if self.functions else None

    def forced_grammar(self, choice: str | Mapping[str, Any] | None) -> ClientTool | None:
        """The custom tool with a Lark grammar that the model must call; None if there is none.

        A grammar describes the input itself, but calls contain the input as a JSON string. The
        grammar can therefore only be enforced on a completion that consists of the input alone.
        """
        if not isinstance(choice, Mapping) or choice.get("type") != "custom":
            return None
        tool = self.by_name.get(str(choice.get("name")))
        return tool if tool is not None and tool.grammar is not None else None

    def _allowed(self, choice: Mapping[str, Any]) -> str | dict[str, Any] | None:
        tools = choice.get("tools")
        if not isinstance(tools, list):
            raise bad_request("tool_choice.tools must be a list of tools", "tool_choice")
        names = [self._named(tool) for tool in tools if isinstance(tool, dict)]
        allowed = [{"type": "function", "function": {"name": name}} for name in names if name]
        if not allowed and tools:
            return "none" if self.functions else None
        mode = choice.get("mode")
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}

    def _named(self, choice: Mapping[str, Any]) -> str | None:
        """The function that a choice names; None for a tool that is not available."""
        kind, name = choice.get("type"), choice.get("name")
        if kind not in ("function", "custom"):
            if isinstance(kind, str) and kind in self.unavailable:
                return None
            raise bad_request(
                'tool_choice must be "auto", "none", "required", an object of type "function" or '
                '"custom" with a name, or one of type "allowed_tools" with mode and tools',
                "tool_choice",
            )
        if isinstance(name, str) and isinstance(namespace := choice.get("namespace"), str):
            return function_name(namespace, name)
        return name if isinstance(name, str) else ""


def client_tools(given: Sequence[Mapping[str, Any]] | None, ignored: Ignored) -> ClientTools:
    """Converts `tools`. Raises ApiError (400) if one is malformed.

    Args:
        given: the tools; None if there are none.
        ignored: counts tools that only other servers run.
    """
    tools = ClientTools()
    for index, tool in enumerate(given or ()):
        _add(tools, index, tool, ignored)
    return tools


def function_name(namespace: str, name: str) -> str:
    """Name of the function for a tool in a namespace."""
    return f"{namespace.rstrip('_')}__{name}"


def arguments_of(text: str) -> str:
    """JSON arguments of a custom tool's call with this input."""
    return msgspec.json.encode({INPUT: text}).decode()


class InputText:
    """Decodes the input of a custom tool's call while its arguments arrive, in linear time.

    Arguments in a form other than `{"input": text}`, which models may write, are decoded at the
    end, as far as possible.
    """

    __slots__ = ("_arguments", "_is_begun", "_is_other", "_rest", "_text")

    def __init__(self) -> None:
        self._arguments: list[str] = []
        self._is_begun = False
        """Whether the arguments have started in the usual form."""
        self._is_other = False
        """Whether the arguments have a form other than the usual one."""
        self._rest = ""
        """Arguments that are not decoded yet."""
        self._text: list[str] = []

    def push(self, arguments: str) -> str:
        """Returns the input that can be decoded with these further arguments; may be empty."""
        self._arguments.append(arguments)
        if self._is_other:
            return ""
        self._rest += arguments
        if not self._is_begun:
            if len(self._rest) < len(BEGUN):
                return ""
            self._is_begun = self._rest.startswith(BEGUN)
            if not self._is_begun:
                self._is_other = True
                return ""
            self._rest = self._rest[len(BEGUN) :]
        found = _CHARACTERS.match(self._rest)
        assert found is not None  # it matches the empty text
        escaped = _HALF.sub("", found.group())
        self._rest = self._rest[len(escaped) :]
        text = _sound(json.loads(f'"{escaped}"'))
        self._text.append(text)
        return text

    def end(self) -> str:
        """Returns the rest of the input, once all arguments have been pushed."""
        before = "".join(self._text)
        text = _sound(_input_of("".join(self._arguments)))
        return text[len(before) :] if text.startswith(before) else ""


def escaped(text: str) -> str:
    """Escapes a text for use inside a JSON string."""
    return msgspec.json.encode(text)[1:-1].decode()


def _sound(text: str) -> str:
    """The text without lone halves of surrogate pairs, which UTF-8 cannot encode."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _input_of(arguments: str) -> str:
    """The custom tool's input, from complete or truncated arguments."""
    given: Any = None
    whole = mended(arguments)
    with contextlib.suppress(ValueError, RecursionError):
        given = json.loads(arguments if whole is None else whole)
    if not isinstance(given, dict):
        return arguments
    values = list(given.values())
    text = given.get(INPUT, values[0] if len(values) == 1 else None)
    if isinstance(text, str):
        return text
    return arguments if given else ""


def _add(
    tools: ClientTools,
    index: int,
    given: Mapping[str, Any],
    ignored: Ignored,
    namespace: str | None = None,
) -> None:
    kind = given.get("type")
    if not isinstance(kind, str):
        raise wrong_at(f"tools[{index}].type", "must be a string")
    if kind == "namespace":
        _add_namespace(tools, index, given, ignored)
    elif kind == "function":
        function = given_tool(index, given, FunctionTool, ignored)
        name = function.name if namespace is None else function_name(namespace, function.name)
        tools.by_name[name] = ClientTool(kind="function", name=function.name, namespace=namespace)
        tools.functions.append(
            function_tool(name, function.description, function.parameters, function.strict)
        )
    elif kind == "custom":
        custom = given_tool(index, given, CustomTool, ignored)
        name = custom.name if namespace is None else function_name(namespace, custom.name)
        form = custom.format
        is_lark = form is not None and form.syntax == "lark"
        tools.by_name[name] = ClientTool(
            kind="custom",
            name=custom.name,
            namespace=namespace,
            grammar=form.definition if form is not None and is_lark else None,
        )
        tools.functions.append(_custom_function(name, custom))
    else:
        ignored.count(f"tools.{kind}")
        tools.unavailable.append(kind)


def _add_namespace(
    tools: ClientTools, index: int, given: Mapping[str, Any], ignored: Ignored
) -> None:
    name, inner = given.get("name"), given.get("tools")
    if not isinstance(name, str) or not isinstance(inner, list):
        raise wrong_at(f"tools[{index}]", "must have a string 'name' and a list 'tools'")
    for tool in inner:
        if not isinstance(tool, dict) or tool.get("type") == "namespace":
            raise wrong_at(f"tools[{index}].tools", "must be functions or custom tools")
        _add(tools, index, tool, ignored, name)


def _custom_function(name: str, tool: CustomTool) -> dict[str, Any]:
    """A custom tool as a function with one argument, its input."""
    description, form = tool.description or "", tool.format
    schema: dict[str, Any] = {"type": "string"}
    is_strict = None
    if form is not None and form.type == "grammar":
        if form.definition is None or form.syntax is None:
            raise bad_request(
                "tools: a format of type grammar requires syntax and definition", "tools"
            )
        if form.syntax == "regex":
            schema["pattern"] = f"^(?:{form.definition})$"
            is_strict = True
        else:
            description += f"\nThe input must match this Lark grammar:\n{form.definition}"
    parameters = {
        "type": "object",
        "properties": {INPUT: schema},
        "required": [INPUT],
        "additionalProperties": False,
    }
    return function_tool(name, description.strip() or None, parameters, is_strict)
