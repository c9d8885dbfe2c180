"""Readers of complete tool calls: from a region of text to names and arguments."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from worker.protocol.argument_types import Schemas

MAX_PYTHON = 2**16
"""Maximum number of characters parsed as Python, which takes 0.1 s."""
_MAX_NAME = 256
"""Maximum length of a function name in characters."""
_SPACE = re.compile(r"\s*")
_CONSTANTS = {"true": True, "false": False, "null": None}
"""JSON's constants, which models also write in Python."""

Properties = Mapping[str, Schemas]
"""Schemas of arguments, by function name."""


class ToolCall(NamedTuple):
    """A complete tool call."""

    name: str
    arguments: str
    """Arguments as a JSON object."""


Read = Callable[[str, Properties], "list[ToolCall] | None"]
"""Parses a region of calls, including markers; returns None if it is malformed."""


def read_nothing(_: str, __: Properties) -> list[ToolCall] | None:
    """Treats a region that `ToolFormat.begun` does not match as malformed."""
    return None


def read_json(*markers: str) -> Read:
    """Creates a reader of a JSON object with name and arguments, or of a list of such objects.

    Args:
        markers: texts around the JSON, outermost first.
    """
    return lambda text, _: _all_calls(_listed(_inside(text, markers), _call_of))


def read_keyed(*markers: str) -> Read:
    """Creates a reader of a JSON object whose only member is the function with its arguments, or of
    a list of such objects.

    Args:
        markers: texts around the JSON, outermost first.
    """
    return lambda text, _: _all_calls(_listed(_inside(text, markers), _keyed_call))


def read_checked(marker: str, separator: str) -> Read:
    """Creates a reader of JSON objects with name and arguments, which must name known functions.

    Args:
        marker: text before the JSON.
        separator: text between objects.
    """

    def read(text: str, properties: Properties) -> list[ToolCall] | None:
        body = text.strip().removeprefix(marker)
        return _all_known(_listed(body, _call_of, separator), properties)

    return read


def read_pythonic(text: str, properties: Properties) -> list[ToolCall] | None:
    """Reads a Python list of function calls, as Llama 4 and LFM2 write it."""
    body = _inside(text, ("<|python_start|>", "<|tool_call_start|>"))
    body = _inside(body, ("<|python_end|>", "<|tool_call_end|>"))
    if not body.startswith("["):
        return None
    nodes = _python(body)
    if len(nodes) != 1 or not isinstance(nodes[0], ast.List):
        return None
    return _all_known(_python_calls(nodes[0].elts), properties)


def read_python_lines(*markers: str) -> Read:
    """Creates a reader of Python function calls on separate lines.

    Args:
        markers: texts around the calls, outermost first.
    """

    def read(text: str, properties: Properties) -> list[ToolCall] | None:
        return _all_known(_python_calls(_python(_inside(text, markers))), properties)

    return read


def read_named(opening: str, closing: str) -> Read:
    """Creates a reader of a call without arguments, which GLM writes as the name alone.

    Args:
        opening: text before the name.
        closing: text after the name.
    """

    def read(text: str, properties: Properties) -> list[ToolCall] | None:
        name = _inside(text, (opening, closing))
        if not text.endswith(closing) and name not in properties:
            return None  # the text ends within a name
        return _all_calls([None if "<" in name else _call(name, {})])

    return read


def python_json(text: str) -> str | None:
    """JSON of a Python list or dictionary, which models may write for an argument; None for other
    text."""
    nodes = _python(text) if text.startswith(("[", "{")) else []
    if len(nodes) != 1 or not isinstance(nodes[0], ast.List | ast.Dict):
        return None
    try:
        return msgspec.json.encode(_literal(nodes[0])).decode()
    except (TypeError, ValueError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr) -> Any:
    """Value of a Python literal, with JSON's constants. Raises ValueError for other expressions."""
    return ast.literal_eval(_Constants().visit(node))


def _inside(text: str, markers: Sequence[str]) -> str:
    """Text between the markers, without surrounding whitespace."""
    text = text.strip()
    for marker in markers:
        text = text.removeprefix(marker).removesuffix(marker).strip()
    return text


def _python(body: str) -> list[ast.expr]:
    """The expressions of a Python program; empty if it is malformed."""
    if len(body) > MAX_PYTHON:
        return []
    try:
        statements = ast.parse(body).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found = [statement.value for statement in statements if isinstance(statement, ast.Expr)]
    return found if len(found) == len(statements) else []


def _python_calls(nodes: Sequence[ast.expr]) -> list[ToolCall | None]:
    try:
        return [_python_call(node) for node in nodes]
    except (ValueError, TypeError, RecursionError, MemoryError):
        return []


def _python_call(node: ast.expr) -> ToolCall | None:
    """The call in a Python expression; None if it is not a call. Raises ValueError for arguments
    that are not literals."""
    if not isinstance(node, ast.Call) or node.args:
        return None
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            return None
        arguments[keyword.arg] = _literal(keyword.value)
    return _call(ast.unparse(node.func), arguments)


class _Constants(ast.NodeTransformer):
    """Replaces JSON's constants with Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Replaces a name if it is a constant."""
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node


def _listed(
    text: str, call_of: Callable[[Any], ToolCall | None], separator: str = ","
) -> list[ToolCall | None]:
    """The call in each entry of a JSON list, or of the rest of a list; None for an entry that is
    not a call."""
    values = _objects(text.strip().removeprefix("[").removesuffix("]"), separator)
    return [call_of(value) for value in values or ()]


def _call(name: object, arguments: object) -> ToolCall | None:
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME or name.split() != [name]:
        return None
    if not isinstance(arguments, dict):
        return None
    try:
        return ToolCall(name, msgspec.json.encode(arguments).decode())
    except (TypeError, ValueError, RecursionError):  # Python values that JSON cannot represent
        return None


def _call_of(value: object) -> ToolCall | None:
    """The call in a JSON object with name and arguments; None for other values."""
    if not isinstance(value, dict):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if arguments is None:
        arguments = {}
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return None
    return _call(value.get("name", value.get("tool_name")), arguments)


def _keyed_call(value: object) -> ToolCall | None:
    """The call in a JSON object with one member; None for other values."""
    if not isinstance(value, dict) or len(value) != 1:
        return None
    [(name, arguments)] = value.items()
    return _call(name, arguments)


def _all_known(calls: Sequence[ToolCall | None], properties: Properties) -> list[ToolCall] | None:
    """The calls if there are any and all functions are known; otherwise None."""
    made = _all_calls(calls)
    return made if made and all(call.name in properties for call in made) else None


def _all_calls(calls: Sequence[ToolCall | None]) -> list[ToolCall] | None:
    """The calls if there are any and all are valid; otherwise None."""
    made = [call for call in calls if call is not None]
    return made if made and len(made) == len(calls) else None


def _objects(text: str, separator: str) -> list[Any] | None:
    """The JSON values of a text, between separators; an incomplete last one is omitted.

    Strings may contain unescaped line breaks, as models often write them.
    """
    values: list[Any] = []
    decoder, at = json.JSONDecoder(strict=False), 0
    text = text.strip()
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return values if values and text[at] == "{" else None
        values.append(value)
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing as well
        if at < len(text) and not text.startswith(separator, at):
            return None
        at = _SPACE.match(text, at + len(separator)).end()  # type: ignore[union-attr]
    return values
