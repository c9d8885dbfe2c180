"""ToolFormat: tool call formats of model families, for parsing and structured output."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec

from router.parsers.arguments import Arguments, TagFormat, TaggedArguments
from router.parsers.json_text import JsonObject
from worker.protocol.argument_types import Schemas

MAX_PYTHON = 2**16
"""Maximum characters parsed as Python, which take 0.1 s."""
_MAX_NAME = 256
"""Maximum characters of a function name."""
_SPACE = re.compile(r"\s*")

Properties = Mapping[str, Schemas]
"""Schemas of arguments, by function name."""


class ToolCall(NamedTuple):
    """A complete tool call."""

    name: str
    arguments: str
    """Arguments as a JSON object."""


Read = Callable[[str, Properties], "list[ToolCall] | None"]
"""Parses a region of calls, including markers; returns None if it is malformed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolFormat:
    """Tool call format of a model family. A region is a part of the text that contains calls."""

    name: str
    """Name in `--tool-call-parser`."""
    read: Read
    """Parses a region that `begun` does not match."""
    begun: re.Pattern[str] | None = None
    """Pattern of the start of a region up to the arguments of its first call, if these can be
    parsed incrementally; its last matched group is the function's name."""
    arguments: Callable[[Schemas], Arguments] = lambda _: JsonObject()
    """Creates the incremental parser of arguments, from the function's schemas."""
    more: re.Pattern[str] | None = None
    """Pattern between a call's arguments and the next call of the region."""
    rest: re.Pattern[str] = re.compile(r"\s*+")
    """Pattern of ignored text between arguments and the end of the region."""
    is_checked: bool = False
    """Whether calls of unknown functions are content, as the format has no marker of calls."""
    regions: tuple[tuple[str, str], ...] = ()
    """Opening and closing markers of regions; if the closing one is empty, a region ends at the
    next opening marker or with the text."""
    leading: str = ""
    """Start of texts that may be a region as a whole, without markers."""
    dropped: tuple[str, ...] = ()
    """Markers around regions, which are dropped."""
    inner: tuple[str, ...] = ()
    """Markers within regions."""
    around: tuple[str, str] = ("", "")
    """Texts before the first and after the last enforced call."""
    before: str = ""
    """Text before the arguments of an enforced call, with NAME for the function; empty if calls in
    this format cannot be enforced."""
    after: str = ""
    """Text after the arguments of an enforced call."""
    separator: str = "\n"
    """Text between two enforced calls."""
    style: Literal["json", "qwen_xml", "glm_xml"] = "json"
    """xgrammar's name of the argument format."""
    short_ids: bool = False
    """Whether call ids must be nine letters and digits."""
    has_single_calls: bool = False
    """Whether chat templates support only one call per message, and no content beside a call and
    reasoning."""

    @property
    def markers(self) -> frozenset[str]:
        """All markers; those that are special tokens must be kept in the text."""
        outer = (marker for region in self.regions for marker in region if marker)
        return frozenset((*outer, *self.dropped, *self.inner))

    def calls_tag(self, schemas: Mapping[str, Any], *, single_call: bool) -> dict[str, Any]:
        """A structural tag (xgrammar) for one or more function calls and nothing else.

        Args:
            schemas: schema of the arguments, by function name.
            single_call: whether only one call is allowed.
        """
        calls: dict[str, Any] = {
            "type": "tags_with_separator",
            "tags": [self._tag(name, schema) for name, schema in schemas.items()],
            "separator": self.separator,
            "at_least_one": True,
            "stop_after_first": single_call,
        }
        begin, end = ({"type": "const_string", "value": text} for text in self.around)
        parts = [begin, calls, end] if any(self.around) else [calls]
        whole = {"type": "sequence", "elements": parts} if len(parts) > 1 else calls
        return {"type": "structural_tag", "format": whole}

    def free_text_tag(
        self, schemas: Mapping[str, Any], *, single_call: bool
    ) -> dict[str, Any] | None:
        """A structural tag (xgrammar) for free text in which calls match the schemas.

        See `calls_tag` for the arguments. None if no marker distinguishes calls from text.
        """
        openings = [opening for opening, _ in self.regions if self.before.startswith(opening)]
        if not self.before or not openings:
            return None
        calls = {
            "type": "triggered_tags",
            "triggers": openings,
            "tags": [self._tag(name, schema) for name, schema in schemas.items()],
            "stop_after_first": single_call,
        }
        return {"type": "structural_tag", "format": calls}

    def _tag(self, name: str, schema: Any) -> dict[str, Any]:
        content = {
            "type": "json_schema",
            "json_schema": schema,
            "style": self.style,
            "max_whitespace_cnt": 1,  # small models repeat it endlessly
        }
        begin = self.before.replace("NAME", name)
        return {"type": "tag", "begin": begin, "content": content, "end": self.after}


def _read_hermes(text: str, _: Properties) -> list[ToolCall] | None:
    body = text.removeprefix("<tool_call>").removesuffix("</tool_call>")
    values = _objects(body, "")
    call = _call_of(values[0]) if values else None
    return None if call is None else [call]


# HAZARD: clients can make models write any text. All repetitions are bounded; otherwise a text
# with many openings would take quadratic time.
_JSON_CALL = (
    r'\{\s{0,32}"name"\s{0,32}:\s{0,32}"([^"\\\s]{1,256})"\s{0,32},'
    r'\s{0,32}"(?:arguments|parameters)"\s{0,32}:\s{0,32}(?=\{)'
)
_ENVELOPE = re.compile(r"\s*+(?:,[^{}]*+)?\}?\s*+[\];]?\s*+")
"""Pattern after the arguments of a JSON call: further members are ignored."""
_NEXT = re.compile(r"\s{0,32}\}\s{0,32},\s{0,32}(?=\{)")
"""Pattern between two calls of a list."""
_TAG_NAME = r"[^\S\n]{0,8}([^<>{`\s]{1,256})[^\S\n]{0,8}"
_QWEN_TAGS = TagFormat(
    opening=re.compile(r"<parameter=([^<>\n]{1,256})>"),
    value_endings=("</parameter>", "<parameter="),
    endings=("</function>", "</tool_call>"),
    is_indented=True,
)
_GLM_TAGS = TagFormat(
    opening=re.compile(r"<arg_key>([^<]{1,256})</arg_key>\s{0,32}<arg_value>"),
    value_endings=("</arg_value>",),
    endings=("</tool_call>",),
)


def _read_nothing(_: str, __: Properties) -> list[ToolCall] | None:
    """Parses a region that `begun` does not match as malformed."""
    return None


def _read_glm(text: str, properties: Properties) -> list[ToolCall] | None:
    """Parses a region with a call without arguments."""
    name = text.removeprefix("<tool_call>").removesuffix("</tool_call>").strip()
    if not text.endswith("</tool_call>") and name not in properties:
        return None  # the text ends within a name
    call = None if "<arg_key>" in name else _call(name, {})
    return None if call is None else [call]


_MISTRAL = r"([\w.-]{1,256})\s{0,32}(?:\[CALL_ID\]\w{1,64}\s{0,32})?(?:\[ARGS\])?\s{0,32}(?=\{)"


def _read_mistral(text: str, _: Properties) -> list[ToolCall] | None:
    """Parses a region with a list of calls, written by models with tokenizers before v11."""
    body = text.removeprefix("[TOOL_CALLS]").strip()
    return _all_calls(_listed(body)) if body.startswith(("[", "{")) else None


def _deepseek(name: str) -> str:
    """A DeepSeek marker, with fullwidth bars and U+2581 between words."""
    return f"<\uff5c{name.replace('_', chr(0x2581))}\uff5c>"


_CALL, _CALL_END = _deepseek("tool_call_begin"), _deepseek("tool_call_end")
_CALLS, _CALLS_END = _deepseek("tool_calls_begin"), _deepseek("tool_calls_end")
_SEP = _deepseek("tool_sep")


def _read_llama(text: str, properties: Properties) -> list[ToolCall] | None:
    found = _objects(text.strip().removeprefix("<|python_tag|>"), ";")
    calls = [_call_of(value) for value in found or ()]
    return _all_known(calls, properties)


def _read_list(text: str, properties: Properties) -> list[ToolCall] | None:
    return _all_known(_listed(text.strip()), properties)


def _listed(text: str) -> list[ToolCall | None]:
    """The calls of a JSON list, or of its rest after some call; None for entries that are not
    calls."""
    values = _objects(text.removeprefix("[").removesuffix("]"), ",")
    return [_call_of(value) for value in values or ()]


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
    """The call in a Python expression; None if it is not a call. Raises ValueError for arguments
    that are not literals."""
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
            begun=re.compile(r"<tool_call>\s{0,32}" + _JSON_CALL),
            rest=_ENVELOPE,
            regions=(("<tool_call>", "</tool_call>"),),
            before='<tool_call>\n{"name": "NAME", "arguments": ',
            after="}\n</tool_call>",
        ),
        ToolFormat(
            name="qwen3_coder",
            read=_read_nothing,
            begun=re.compile(rf"(?:<tool_call>)?[^<]{{0,64}}<function={_TAG_NAME}>"),
            arguments=partial(TaggedArguments, _QWEN_TAGS),
            more=re.compile(r"\s{0,32}</function>[^<]{0,64}(?=<function=)"),
            rest=re.compile(r"\s*+(?:<[/a-z]*+>?)?\s*+"),
            regions=(("<tool_call>", "</tool_call>"), ("<function=", "</function>")),
            dropped=("</tool_call>",),
            before="<tool_call>\n<function=NAME>\n",
            after="\n</function>\n</tool_call>",
            style="qwen_xml",
        ),
        ToolFormat(
            name="glm45",
            read=_read_glm,
            begun=re.compile(rf"<tool_call>\s{{0,32}}{_TAG_NAME}\s{{0,32}}(?=<arg_key>)"),
            arguments=partial(TaggedArguments, _GLM_TAGS),
            regions=(("<tool_call>", "</tool_call>"),),
            inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
            before="<tool_call>NAME",
            after="</tool_call>",
            style="glm_xml",
        ),
        ToolFormat(
            name="llama3_json",
            read=_read_llama,
            begun=re.compile(r"\s{0,32}(?:<\|python_tag\|>)?\s{0,32}" + _JSON_CALL),
            more=re.compile(r"\s{0,32}\}\s{0,32};\s{0,32}(?=\{)"),
            rest=_ENVELOPE,
            is_checked=True,
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
            begun=re.compile(
                rf"(?:\[TOOL_CALLS\])?\s{{0,32}}(?:\[?\s{{0,32}}{_JSON_CALL}|{_MISTRAL})"
            ),
            more=_NEXT,
            rest=_ENVELOPE,
            regions=(("[TOOL_CALLS]", ""),),
            inner=("[ARGS]", "[CALL_ID]"),
            short_ids=True,
        ),
        ToolFormat(
            name="deepseek_v31",
            read=_read_nothing,
            begun=re.compile(
                rf"{_CALL}\s{{0,32}}(?:function{_SEP}{_TAG_NAME}\s{{0,32}}```json|{_TAG_NAME}{_SEP})"
                r"\s{0,32}(?=\{)"
            ),
            rest=re.compile(r"\s*+(?:```)?\s*+"),
            regions=((_CALL, _CALL_END),),
            dropped=(_CALLS, _CALLS_END),
            inner=(_SEP,),
            around=(_CALLS, _CALLS_END),
            before=_CALL + "NAME" + _SEP,
            after=_CALL_END,
            separator="",
        ),
        # Parsed by `HarmonyParser`. Grammars do not generate its markers, which are special tokens.
        ToolFormat(name="harmony", read=_read_nothing, has_single_calls=True),
        ToolFormat(
            name="json",
            read=_read_list,
            begun=re.compile(r"\s{0,32}\[?\s{0,32}" + _JSON_CALL),
            more=_NEXT,
            rest=_ENVELOPE,
            is_checked=True,
            leading="[",
            around=("[", "]"),
            before='{"name": "NAME", "parameters": ',
            after="}",
            separator=", ",
        ),
    )
}
"""Formats by name. `json` is used for enforced calls if the model's own format cannot be."""

_SIGNS = (
    ("<|channel|>analysis<|message|>", "harmony"),
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
"""Texts in chat templates that indicate a format, in order of precedence."""


def format_of(template: str) -> ToolFormat | None:
    """The tool call format of a chat template (Jinja source); None if it is unknown."""
    return next((FORMATS[name] for sign, name in _SIGNS if sign in template), None)


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
    return _call(value.get("name"), arguments)


def _all_known(calls: Sequence[ToolCall | None], properties: Properties) -> list[ToolCall] | None:
    """The calls if there are any and all functions are known; else None."""
    made = _all_calls(calls)
    return made if made and all(call.name in properties for call in made) else None


def _all_calls(calls: Sequence[ToolCall | None]) -> list[ToolCall] | None:
    """The calls if there are any and all are valid; else None."""
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
        if at < len(text) and not (separator and text.startswith(separator, at)):
            return None
        at = _SPACE.match(text, at + len(separator)).end()  # type: ignore[union-attr]
    return values
