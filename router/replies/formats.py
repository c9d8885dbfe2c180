"""How families of models write calls of functions, read and forced."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec

MAX_PYTHON = 2**16
"""Characters that are parsed as Python: a tenth of a second."""
_MAX_NAME = 256
_SPACE = re.compile(r"\s*")

Properties = Mapping[str, Mapping[str, Any]]
"""Schemas of the arguments of each function that there is, by its name."""


class ToolCall(NamedTuple):
    """One call that a model has made."""

    name: str
    arguments: str
    """A JSON object."""


Read = Callable[[str, Properties], "list[ToolCall] | None"]
"""The calls in a region of a text, markers included; None where it is malformed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolFormat:
    """How one family writes calls."""

    name: str
    """In `--tool-call-parser`."""
    read: Read
    regions: tuple[tuple[str, str], ...] = ()
    """(opening, closing) of what holds calls; an empty closing is the next opening, or the end."""
    leading: str = ""
    """A text that begins so is calls as a whole, if it holds any."""
    dropped: tuple[str, ...] = ()
    """Markers around regions, which mean nothing."""
    inner: tuple[str, ...] = ()
    """Markers within regions."""
    around: tuple[str, str] = ("", "")
    """What a forced answer has before its first call and after its last."""
    before: str = ""
    """What a forced call has before its arguments, NAME for the function; empty where it cannot be
    forced in this format."""
    after: str = ""
    """What it has after them."""
    separator: str = "\n"
    style: Literal["json", "qwen_xml", "glm_xml"] = "json"
    """xgrammar's name of the way in which arguments are written."""
    short_ids: bool = False
    """Whether ids of calls must have nine letters and digits."""

    @property
    def markers(self) -> frozenset[str]:
        """All of them: where they are tokens, they must not be left out of the text."""
        outer = (marker for region in self.regions for marker in region if marker)
        return frozenset((*outer, *self.dropped, *self.inner))

    def forced(self, schemas: Mapping[str, Any], *, is_one: bool) -> dict[str, Any]:
        """A structural tag that admits calls of these functions alone, at least one.

        Args:
            schemas: of the arguments, by the functions' names.
            is_one: whether it admits one call only.
        """
        calls: dict[str, Any] = {
            "type": "tags_with_separator",
            "tags": [self._tag(name, schema) for name, schema in schemas.items()],
            "separator": self.separator,
            "at_least_one": True,
            "stop_after_first": is_one,
        }
        begin, end = ({"type": "const_string", "value": text} for text in self.around)
        parts = [begin, calls, end] if any(self.around) else [calls]
        whole = {"type": "sequence", "elements": parts} if len(parts) > 1 else calls
        return {"type": "structural_tag", "format": whole}

    def _tag(self, name: str, schema: Any) -> dict[str, Any]:
        content = {
            "type": "json_schema",
            "json_schema": schema,
            "style": self.style,
            "max_whitespace_cnt": 1,  # weak models fill their tokens with it
        }
        begin = self.before.replace("NAME", name)
        return {"type": "tag", "begin": begin, "content": content, "end": self.after}


def _read_hermes(text: str, _: Properties) -> list[ToolCall] | None:
    body = text.removeprefix("<tool_call>").removesuffix("</tool_call>")
    values = _objects(body, "")
    call = _call_of(values[0]) if values else None
    return None if call is None else [call]


# HAZARD: models write what clients ask for. Names are bounded, or a text of openings would take the
# square of its length.
_FUNCTION = re.compile(r"<function=([^>\n]{1,256})>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(
    r"<parameter=([^>\n]{1,256})>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL
)


def _read_qwen_coder(text: str, properties: Properties) -> list[ToolCall] | None:
    calls = []
    for name, body in _FUNCTION.findall(text):
        schemas = properties.get(name.strip(), {})
        arguments = {}
        for key, value in _PARAMETER.findall(body):
            value = value.removeprefix("\n").removesuffix("\n")
            arguments[key.strip()] = _typed(value, schemas.get(key.strip()))
        call = _call(name.strip(), arguments)
        if call is None:
            return None
        calls.append(call)
    return calls or None


_ARGUMENT = re.compile(
    r"<arg_key>(.{1,256}?)</arg_key>\s*<arg_value>(.*?)(?:</arg_value>|\Z)", re.DOTALL
)


def _read_glm(text: str, properties: Properties) -> list[ToolCall] | None:
    body = text.removeprefix("<tool_call>").removesuffix("</tool_call>")
    name, pairs, _ = body.partition("<arg_key>")
    name = name.strip()
    if not pairs and not text.endswith("</tool_call>") and name not in properties:
        return None  # the text ends within a name
    schemas = properties.get(name, {})
    arguments = {
        key.strip(): _typed(value, schemas.get(key.strip()))
        for key, value in _ARGUMENT.findall(body)
    }
    call = _call(name, arguments)
    return None if call is None else [call]


_MISTRAL = re.compile(r"\s*([\w.-]{1,256})\s*(?:\[CALL_ID\]\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")


def _read_mistral(text: str, properties: Properties) -> list[ToolCall] | None:
    body = text.removeprefix("[TOOL_CALLS]").strip()
    if body.startswith("["):
        return _read_list(body, properties)
    found = _MISTRAL.match(body)
    if found is None:
        return None
    arguments = _objects(body[found.end() :], "")
    call = _call(found[1], arguments[0]) if arguments and len(arguments) == 1 else None
    return None if call is None else [call]


def _deepseek(name: str) -> str:
    """A marker as DeepSeek spells them: with a wide bar, and blocks between words."""
    return f"<\uff5c{name.replace('_', chr(0x2581))}\uff5c>"


_CALL, _CALL_END = _deepseek("tool_call_begin"), _deepseek("tool_call_end")
_CALLS, _CALLS_END = _deepseek("tool_calls_begin"), _deepseek("tool_calls_end")
_SEP = _deepseek("tool_sep")


def _read_deepseek(text: str, properties: Properties) -> list[ToolCall] | None:
    """Of V3.1, and of V3 and R1, which write `function` first and fence the arguments."""
    body = text.removeprefix(_CALL).removesuffix(_CALL_END)
    name, separator, rest = body.partition(_SEP)
    if name.strip() == "function" and "```" in rest:
        name, _, rest = rest.partition("\n")
        rest = rest.strip().removeprefix("```json").removesuffix("```")
    arguments = _objects(rest, "") if separator else None
    call = _call(name.strip(), arguments[0]) if arguments and len(arguments) == 1 else None
    return None if call is None else [call]


def _read_llama(text: str, properties: Properties) -> list[ToolCall] | None:
    found = _objects(text.strip().removeprefix("<|python_tag|>"), ";")
    calls = [_call_of(value) for value in found or ()]
    return _all_known(calls, properties)


def _read_list(text: str, properties: Properties) -> list[ToolCall] | None:
    body = text.strip()
    if not body.startswith("["):
        return None
    values = _objects(body.removeprefix("[").removesuffix("]"), ",")
    return _all_known([_call_of(value) for value in values or ()], properties)


def _read_pythonic(text: str, properties: Properties) -> list[ToolCall] | None:
    body = text.strip().removeprefix("<|python_start|>").removesuffix("<|python_end|>").strip()
    if len(body) > MAX_PYTHON or not body.startswith("["):
        return None
    try:
        parsed = ast.parse(body, mode="eval").body
        calls = [_python_call(node) for node in getattr(parsed, "elts", ())]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return _all_known(calls, properties)


def _python_call(node: ast.expr) -> ToolCall | None:
    """Raises ValueError for arguments that are no literals."""
    if not isinstance(node, ast.Call) or node.args:
        return None
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            return None
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    return _call(ast.unparse(node.func), arguments)


FORMATS: Mapping[str, ToolFormat] = {
    made.name: made
    for made in (
        ToolFormat(
            name="hermes",
            read=_read_hermes,
            regions=(("<tool_call>", "</tool_call>"),),
            before='<tool_call>\n{"name": "NAME", "arguments": ',
            after="}\n</tool_call>",
        ),
        ToolFormat(
            name="qwen3_coder",
            read=_read_qwen_coder,
            regions=(("<tool_call>", "</tool_call>"), ("<function=", "</function>")),
            dropped=("</tool_call>",),
            before="<tool_call>\n<function=NAME>\n",
            after="\n</function>\n</tool_call>",
            style="qwen_xml",
        ),
        ToolFormat(
            name="glm45",
            read=_read_glm,
            regions=(("<tool_call>", "</tool_call>"),),
            inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
            before="<tool_call>NAME",
            after="</tool_call>",
            style="glm_xml",
        ),
        ToolFormat(
            name="llama3_json",
            read=_read_llama,
            regions=(("<|python_tag|>", ""),),
            leading="{",
            before='{"name": "NAME", "parameters": ',
            after="}",
            separator="; ",
        ),
        ToolFormat(
            name="pythonic",
            read=_read_pythonic,
            regions=(("<|python_start|>", "<|python_end|>"),),
            leading="[",
        ),
        ToolFormat(
            name="mistral",
            read=_read_mistral,
            regions=(("[TOOL_CALLS]", ""),),
            inner=("[ARGS]", "[CALL_ID]"),
            short_ids=True,
        ),
        ToolFormat(
            name="deepseek_v31",
            read=_read_deepseek,
            regions=((_CALL, _CALL_END),),
            dropped=(_CALLS, _CALLS_END),
            inner=(_SEP,),
            around=(_CALLS, _CALLS_END),
            before=_CALL + "NAME" + _SEP,
            after=_CALL_END,
            separator="",
        ),
        ToolFormat(
            name="json",
            read=_read_list,
            leading="[",
            around=("[", "]"),
            before='{"name": "NAME", "parameters": ',
            after="}",
            separator=", ",
        ),
    )
}
"""By name; json is what calls are forced in where the model's own format cannot be."""

_SIGNS = (
    ("tool▁call▁begin", "deepseek_v31"),
    ("[TOOL_CALLS]", "mistral"),
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm45"),
    ("<tool_call>", "hermes"),
    ("<|python_start|>", "pythonic"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary of argument name', "llama3_json"),
)
"""What chat templates hold of which format; the first that is found counts."""


def format_of(template: str) -> ToolFormat | None:
    """The format that a chat template, in Jinja, shows to its model; None for one not known."""
    return next((FORMATS[name] for sign, name in _SIGNS if sign in template), None)


def _call(name: object, arguments: object) -> ToolCall | None:
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME or name.split() != [name]:
        return None
    if not isinstance(arguments, dict):
        return None
    try:
        return ToolCall(name, msgspec.json.encode(arguments).decode())
    except (TypeError, ValueError, RecursionError):  # what Python has and JSON has not
        return None


def _call_of(value: object) -> ToolCall | None:
    """The call that an object of its name and arguments is."""
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
    return _call(value.get("name"), arguments)


def _all_known(calls: Sequence[ToolCall | None], properties: Properties) -> list[ToolCall] | None:
    """The calls, where no marker tells that they are any: they must be of functions there are."""
    known = [call for call in calls if call is not None and call.name in properties]
    return known if known and len(known) == len(calls) else None


def _objects(text: str, separator: str) -> list[Any] | None:
    """The JSON values that a text consists of; the last one is left out where it is cut off.

    Texts in them may go over lines: models forget to escape the line breaks of what they quote.
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
        if at < len(text) and not (separator and text.startswith(separator, at)):
            return None
        at = _SPACE.match(text, at + len(separator)).end()  # type: ignore[union-attr]
    return values


def _typed(value: str, schema: Mapping[str, Any] | None) -> Any:
    """An argument that is written as plain text, by its type: a string stays as it is.

    One of some values loses the white space around it, which grammars let models write.
    """
    choices = schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(choices, list) and value not in choices and value.strip() in choices:
        return value.strip()
    types = _types(schema)
    if "null" in types and value.strip() == "null":
        return None
    if not types or "string" in types:
        return value
    written = value.strip()
    if "boolean" in types and written in ("True", "False"):
        return written == "True"
    try:
        return msgspec.json.decode(written)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return value


def _types(schema: object) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    own = schema.get("type")
    types = {own} if isinstance(own, str) else set()
    if isinstance(own, list):
        types = {name for name in own if isinstance(name, str)}
    for union in ("anyOf", "oneOf"):
        branches = schema.get(union)
        for branch in branches if isinstance(branches, list) else ():
            if isinstance(branch, Mapping) and isinstance(branch.get("type"), str):
                types.add(branch["type"])
    return types
