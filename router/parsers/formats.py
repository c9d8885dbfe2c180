"""ToolFormat: tool call formats of model families, for parsing and structured output."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from router.parsers.arguments import Arguments, TagFormat, TaggedArguments
from router.parsers.calls import (
    Read,
    read_checked,
    read_json,
    read_keyed,
    read_named,
    read_nothing,
    read_python_lines,
    read_pythonic,
)
from router.parsers.gemma import GemmaArguments
from router.parsers.json_text import JsonObject
from worker.protocol.argument_types import Schemas

CallIds = Literal["any", "short", "indexed"]
"""Form of call ids: any text, nine letters and digits (Mistral), or `functions.NAME:INDEX`, where
INDEX counts the calls of the chat (Kimi)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolFormat:
    """Tool call format of a model family. A region is a part of the text that contains calls."""

    name: str
    """Name of the format, a value of `--tool-call-parser`."""
    read: Read
    """Parses a region that `begun` does not match."""
    begun: re.Pattern[str] | None = None
    """Pattern of the start of a region up to the arguments of its first call, if these can be
    parsed incrementally; the last group that matches is the function's name."""
    arguments: Callable[[Schemas], Arguments] = lambda _: JsonObject()
    """Creates the incremental parser of arguments, from the function's schemas."""
    more: re.Pattern[str] | None = None
    """Pattern of the text between a call's arguments and the next call of the region."""
    rest: re.Pattern[str] = re.compile(r"\s*+")
    """Pattern of the text between arguments and the end of the region, which is ignored."""
    is_checked: bool = False
    """Whether calls of unknown functions are treated as content, since the format does not mark
    calls."""
    regions: tuple[tuple[str, str], ...] = ()
    """Opening and closing markers of regions; if the closing one is empty, a region ends at the
    next opening marker or with the text."""
    leading: str = ""
    """First characters of a text that may, as a whole, be a region without markers."""
    has_leading_name: bool = False
    """Whether a text that starts with a line with a known function's name may, as a whole, be a
    region.
    """
    dropped: tuple[str, ...] = ()
    """Markers around regions; they are dropped from the text."""
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
    """Text between enforced calls."""
    style: Literal["json", "qwen_xml", "glm_xml"] = "json"
    """xgrammar's name of the argument format."""
    ids: CallIds = "any"
    """Form of call ids in chat templates."""
    has_single_calls: bool = False
    """Whether chat templates support only one call per message, and no content alongside a call and
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


# HAZARD: clients can make models write any text. All repetitions are bounded; otherwise a text
# with many openings would take quadratic time.
_NAME = r"([^<>{`\s]{1,256})"
_QUOTED_NAME = r'"([^"\\\s]{1,256})"'
_ID = r'(?:"(?:tool_call_)?id"\s{0,32}:\s{0,32}"[^"\\]{0,64}"\s{0,32},\s{0,32})?'
_JSON_CALL = (
    r"\{\s{0,32}" + _ID + r'"(?:tool_)?name"\s{0,32}:\s{0,32}' + _QUOTED_NAME + r"\s{0,32},"
    r'\s{0,32}"(?:arguments|parameters)"\s{0,32}:\s{0,32}(?=\{)'
)
_ENVELOPE = re.compile(r"\s*+(?:,[^{}]*+)?\}?\s*+[\];]?\s*+")
"""Pattern of the text after the arguments of a JSON call, including further members of its object,
which are ignored."""
_NEXT = re.compile(r"\s{0,32}\}\s{0,32},\s{0,32}(?=\{)")
"""Pattern of the text between calls of a list."""
_TAG_NAME = rf"[^\S\n]{{0,8}}{_NAME}[^\S\n]{{0,8}}"


def _json_calls(opening: str) -> re.Pattern[str]:
    """Pattern of a JSON call, or of the first call of a list, after an optional opening marker."""
    return re.compile(rf"(?:{re.escape(opening)})?\s{{0,32}}\[?\s{{0,32}}{_JSON_CALL}")


def json_format(name: str, opening: str, closing: str, **options: Any) -> ToolFormat:
    """A format in which a call is a JSON object with name and arguments between markers.

    The JSON may also be a list of such objects.

    Args:
        name: name of the format.
        opening: marker before the JSON.
        closing: marker after the JSON; empty if there is none.
        options: other fields of the format.
    """
    return ToolFormat(
        name=name,
        read=read_json(opening, closing),
        begun=_json_calls(opening),
        more=_NEXT,
        rest=_ENVELOPE,
        regions=((opening, closing),),
        **options,
    )


def _invoke_format(name: str, prefix: str, *wrappers: str) -> ToolFormat:
    """A format of tags `<PREFIXinvoke name="NAME">` and `<PREFIXparameter name="NAME">`.

    The attribute `string` of a parameter, if any, distinguishes text from JSON.

    Args:
        name: name of the format.
        prefix: text before the tags' names.
        wrappers: full names of the tags around calls.
    """
    tag, names = re.escape(prefix), "|".join(map(re.escape, wrappers))
    tags = TagFormat(
        opening=re.compile(
            rf'<{tag}parameter name="?([^"<>\n]{{1,256}})"?(?:\s{{1,8}}string="(true|false)")?>'
        ),
        value_endings=(f"</{prefix}parameter>", f"<{prefix}parameter name="),
        endings=(f"</{prefix}invoke>", *(f"</{wrapper}>" for wrapper in wrappers)),
    )
    return ToolFormat(
        name=name,
        read=read_nothing,
        begun=re.compile(
            rf'(?:<(?:{names})>\s{{0,32}})?<{tag}invoke name="?([^"<>\s]{{1,256}})"?>'
        ),
        arguments=partial(TaggedArguments, tags),
        more=re.compile(rf"\s{{0,32}}</{tag}invoke>\s{{0,32}}(?=<{tag}invoke )"),
        rest=re.compile(rf"\s*+(?:</{tag}invoke>)?\s*+"),
        regions=tuple((f"<{wrapper}>", f"</{wrapper}>") for wrapper in wrappers),
        inner=(prefix,) if prefix else (),
    )


def _hunyuan_format(name: str, suffix: str) -> ToolFormat:
    """Hy3's format; the names of its tags end in `suffix`, which may be empty."""
    tag = {
        part: (f"<{part}{suffix}>", f"</{part}{suffix}>")
        for part in ("tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value")
    }
    opening, closing = tag["tool_call"]
    tags = TagFormat(
        opening=re.compile(
            rf"{tag['arg_key'][0]}([^<]{{1,256}}){tag['arg_key'][1]}\s{{0,32}}{tag['arg_value'][0]}"
        ),
        value_endings=(tag["arg_value"][1],),
        endings=(closing,),
    )
    return ToolFormat(
        name=name,
        read=read_nothing,
        begun=re.compile(rf"{opening}\s{{0,32}}{_TAG_NAME}\s{{0,32}}{tag['tool_sep'][0]}"),
        arguments=partial(TaggedArguments, tags),
        regions=(tag["tool_call"],),
        dropped=tag["tool_calls"],
        inner=(tag["tool_sep"][0], *tag["arg_key"], *tag["arg_value"]),
    )


_QWEN_TAGS = TagFormat(
    opening=re.compile(r"<parameter=([^<>\n]{1,256})>"),
    value_endings=("</parameter>", "<parameter="),
    endings=("</function>", "</tool_call>"),
    is_indented=True,
)
_SEED_TAGS = TagFormat(
    opening=_QWEN_TAGS.opening,
    value_endings=_QWEN_TAGS.value_endings,
    endings=("</function>", "</seed:tool_call>"),
)
_GLM_TAGS = TagFormat(
    opening=re.compile(r"<arg_key>([^<]{1,256})</arg_key>\s{0,32}<arg_value>"),
    value_endings=("</arg_value>",),
    endings=("</tool_call>",),
)
_LONGCAT_TAGS = TagFormat(
    opening=re.compile(
        r"<longcat_arg_key>([^<]{1,256})</longcat_arg_key>\s{0,32}<longcat_arg_value>"
    ),
    value_endings=("</longcat_arg_value>",),
    endings=("</longcat_tool_call>",),
)
_DSML = "\uff5cDSML\uff5c"

_MISTRAL = r"([\w.-]{1,256})\s{0,32}(?:\[CALL_ID\]\w{1,64}\s{0,32})?(?:\[ARGS\])?\s{0,32}(?=\{)"


def _deepseek(name: str) -> str:
    """A DeepSeek marker, with fullwidth bars and U+2581 between words."""
    return f"<\uff5c{name.replace('_', chr(0x2581))}\uff5c>"


_CALL, _CALL_END = _deepseek("tool_call_begin"), _deepseek("tool_call_end")
_CALLS, _CALLS_END = _deepseek("tool_calls_begin"), _deepseek("tool_calls_end")
_SEP = _deepseek("tool_sep")
_HERMES = '{"name": "NAME", "arguments": '

FORMATS: Mapping[str, ToolFormat] = {
    made.name: made
    for made in (
        # Hermes, Qwen, Granite 4, ERNIE 4.5, EXAONE 4 (vLLM: hermes, granite4, ernie45).
        json_format(
            "hermes",
            "<tool_call>",
            "</tool_call>",
            before=f"<tool_call>\n{_HERMES}",
            after="}\n</tool_call>",
        ),
        ToolFormat(  # Qwen3-Coder, Qwen3.5 (vLLM: qwen3_coder)
            name="qwen3_coder",
            read=read_nothing,
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
        ToolFormat(  # vLLM: seed_oss. Its values are not on lines of their own.
            name="seed_oss",
            read=read_nothing,
            begun=re.compile(rf"<seed:tool_call>\s{{0,32}}<function={_TAG_NAME}>"),
            arguments=partial(TaggedArguments, _SEED_TAGS),
            more=re.compile(r"\s{0,32}</function>\s{0,32}(?=<function=)"),
            rest=re.compile(r"\s*+(?:</function>)?\s*+"),
            regions=(("<seed:tool_call>", "</seed:tool_call>"),),
        ),
        ToolFormat(  # GLM 4.5 to 5 (vLLM: glm45, glm47)
            name="glm45",
            read=read_named("<tool_call>", "</tool_call>"),
            begun=re.compile(rf"<tool_call>\s{{0,32}}{_TAG_NAME}\s{{0,32}}(?=<arg_key>)"),
            arguments=partial(TaggedArguments, _GLM_TAGS),
            regions=(("<tool_call>", "</tool_call>"),),
            inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
            before="<tool_call>NAME",
            after="</tool_call>",
            style="glm_xml",
        ),
        # LongCat-Flash-Chat (vLLM: longcat; SGLang: longcat).
        json_format(
            "longcat",
            "<longcat_tool_call>",
            "</longcat_tool_call>",
            before=f"<longcat_tool_call>\n{_HERMES}",
            after="}\n</longcat_tool_call>",
        ),
        ToolFormat(  # LongCat-Flash-Lite and -Thinking-2601, by their chat template
            name="longcat_xml",
            read=read_named("<longcat_tool_call>", "</longcat_tool_call>"),
            begun=re.compile(
                rf"<longcat_tool_call>\s{{0,32}}{_TAG_NAME}\s{{0,32}}(?=<longcat_arg_key>)"
            ),
            arguments=partial(TaggedArguments, _LONGCAT_TAGS),
            regions=(("<longcat_tool_call>", "</longcat_tool_call>"),),
            inner=(
                *("<longcat_arg_key>", "</longcat_arg_key>"),
                *("<longcat_arg_value>", "</longcat_arg_value>"),
            ),
        ),
        # MiniMax M2 (vLLM: minimax_m2).
        _invoke_format("minimax_m2", "", "minimax:tool_call"),
        # DeepSeek V3.2, and V4 with its own wrapper (vLLM: deepseek_v32, deepseek_v4).
        _invoke_format("deepseek_v32", _DSML, f"{_DSML}function_calls", f"{_DSML}tool_calls"),
        ToolFormat(  # Kimi K2, K2.5 (vLLM: kimi_k2)
            name="kimi_k2",
            read=read_nothing,
            begun=re.compile(
                r"<\|tool_call_begin\|>\s{0,32}(?:functions\.)?([^<>{`\s:]{1,256})(?::\d{1,9})?"
                r"\s{0,32}<\|tool_call_argument_begin\|>\s{0,32}(?=\{)"
            ),
            regions=(("<|tool_call_begin|>", "<|tool_call_end|>"),),
            dropped=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            inner=("<|tool_call_argument_begin|>",),
            ids="indexed",
        ),
        ToolFormat(  # Gemma 4 (vLLM: gemma4)
            name="gemma4",
            read=read_nothing,
            begun=re.compile(rf"<\|tool_call>\s{{0,32}}call:{_TAG_NAME}\s{{0,32}}(?=\{{)"),
            arguments=lambda _: GemmaArguments(),
            regions=(("<|tool_call>", "<tool_call|>"),),
            inner=('<|"|>',),
        ),
        # Granite 3 (vLLM: granite).
        json_format("granite", "<|tool_call|>", ""),
        # Command R7B, Command A (vLLM: cohere_command3).
        json_format("command", "<|START_ACTION|>", "<|END_ACTION|>"),
        # Hunyuan A13B and dense models (vLLM: hunyuan_a13b).
        json_format(
            "hunyuan",
            "<tool_calls>",
            "</tool_calls>",
            around=("<tool_calls>[", "]</tool_calls>"),
            before=_HERMES,
            after="}",
            separator=", ",
        ),
        # Hy3 and its preview, whose tags have no suffix (vLLM: hy_v3).
        _hunyuan_format("hy_v3", ":opensource"),
        _hunyuan_format("hy_v3_preview", ""),
        # InternLM 2 and 3 (vLLM: internlm); `<|plugin|>` distinguishes functions from code.
        ToolFormat(
            name="internlm",
            read=read_json("<|action_start|>", "<|action_end|>", "<|plugin|>"),
            begun=re.compile(rf"<\|action_start\|>\s{{0,32}}<\|plugin\|>\s{{0,32}}{_JSON_CALL}"),
            rest=_ENVELOPE,
            regions=(("<|action_start|>", "<|action_end|>"),),
            inner=("<|plugin|>",),
        ),
        # Phi-4-mini, by its model card; `functools` is written with vLLM's chat template
        # (phi4_mini_json), whose calls have no closing marker.
        ToolFormat(
            name="phi4_mini",
            read=read_json("<|tool_call|>", "<|/tool_call|>", "functools"),
            begun=re.compile(
                rf"(?:<\|tool_call\|>|functools(?=\[))?\s{{0,32}}\[?\s{{0,32}}{_JSON_CALL}"
            ),
            more=_NEXT,
            rest=_ENVELOPE,
            regions=(("<|tool_call|>", "<|/tool_call|>"), ("functools[", "")),
        ),
        # Nemotron (vLLM: nemotron_json).
        json_format(
            "nemotron",
            "<TOOLCALL>",
            "</TOOLCALL>",
            around=("<TOOLCALL>[", "]</TOOLCALL>"),
            before=_HERMES,
            after="}",
            separator=", ",
        ),
        ToolFormat(  # Apertus (vLLM: apertus)
            name="apertus",
            read=read_keyed("<|tools_prefix|>", "<|tools_suffix|>"),
            begun=re.compile(
                r"(?:<\|tools_prefix\|>)?\s{0,32}\[?\s{0,32}\{\s{0,32}"
                + _QUOTED_NAME
                + r"\s{0,32}:\s{0,32}(?=\{)"
            ),
            more=_NEXT,
            rest=re.compile(r"\s*+\}?\s*+\]?\s*+"),
            regions=(("<|tools_prefix|>", "<|tools_suffix|>"),),
        ),
        ToolFormat(  # Solar Open (vLLM: solar_open)
            name="solar_open",
            read=read_nothing,
            begun=re.compile(
                r"<\|tool_call:begin\|>\s{0,32}[\w-]{0,64}\s{0,32}<\|tool_call:name\|>"
                + _TAG_NAME
                + r"\s{0,32}<\|tool_call:args\|>\s{0,32}(?=\{)"
            ),
            regions=(("<|tool_call:begin|>", "<|tool_call:end|>"),),
            dropped=("<|begin|>assistant<|tool_calls|>", "<|tool_calls|>", "<|calls|>"),
            inner=("<|tool_call:name|>", "<|tool_call:args|>"),
        ),
        ToolFormat(  # Llama 3 (vLLM: llama3_json)
            name="llama3_json",
            read=read_checked("<|python_tag|>", ";"),
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
        ToolFormat(  # Llama 3.2 and 4, LFM2 (vLLM: pythonic, llama4_pythonic, lfm2)
            name="pythonic",
            read=read_pythonic,
            regions=(
                ("<|python_start|>", "<|python_end|>"),
                ("<|tool_call_start|>", "<|tool_call_end|>"),
            ),
            leading="[",
        ),
        ToolFormat(  # GLM-4, by its chat template: a message for a function has its name
            name="glm4",
            read=read_nothing,
            begun=re.compile(rf"\s{{0,32}}{_NAME}\n\s{{0,32}}(?=\{{)"),
            is_checked=True,
            has_leading_name=True,
        ),
        ToolFormat(  # OLMo 3 (vLLM: olmo3)
            name="olmo3",
            read=read_python_lines("<function_calls>", "</function_calls>"),
            regions=(("<function_calls>", "</function_calls>"),),
        ),
        ToolFormat(  # vLLM: mistral
            name="mistral",
            # Lists of calls are written by models with tokenizers before v11.
            read=read_json("[TOOL_CALLS]"),
            begun=re.compile(
                rf"(?:\[TOOL_CALLS\])?\s{{0,32}}(?:\[?\s{{0,32}}{_JSON_CALL}|{_MISTRAL})"
            ),
            more=_NEXT,
            rest=_ENVELOPE,
            regions=(("[TOOL_CALLS]", ""),),
            inner=("[ARGS]", "[CALL_ID]"),
            ids="short",
        ),
        ToolFormat(  # DeepSeek V3, R1 and V3.1 (vLLM: deepseek_v3, deepseek_v31)
            name="deepseek_v31",
            read=read_nothing,
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
        ToolFormat(name="harmony", read=read_nothing, has_single_calls=True),
        ToolFormat(
            name="json",
            read=read_checked("", ","),
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
"""Formats by name. `json` is used for enforced calls if the model's own format cannot be enforced.
"""

_SIGNS = (
    ("<|channel|>analysis<|message|>", "harmony"),
    (_DSML, "deepseek_v32"),
    ("tool▁call▁begin", "deepseek_v31"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call_argument_begin|>", "kimi_k2"),
    ("tool_declare<|im_middle|>", "kimi_k2"),  # K2's first template, without calls in history
    ("<minimax:tool_call>", "minimax_m2"),
    ("<seed:tool_call>", "seed_oss"),
    ("<longcat_arg_key>", "longcat_xml"),
    ("<longcat_tool_call>", "longcat"),
    (":opensource", "hy_v3"),
    ("<tool_sep>", "hy_v3_preview"),
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm45"),
    ("<|tool_call>call:", "gemma4"),
    ("<|START_ACTION|>", "command"),
    ("<|tools_prefix|>", "apertus"),
    ("<|tool_call:begin|>", "solar_open"),
    ("<|action_start|>", "internlm"),
    ("<|/tool|>", "phi4_mini"),
    ("functools[", "phi4_mini"),
    ("<|tool_call|>", "granite"),
    ("<tool_calls>", "hunyuan"),
    ("<TOOLCALL>", "nemotron"),
    ("<tool_call>", "hermes"),
    ("<function_calls>", "olmo3"),
    ("<|python_start|>", "pythonic"),
    ("<|tool_call_start|>", "pythonic"),
    ("<|tool_list_start|>", "pythonic"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ("<|observation|>", "glm4"),
    ('"parameters": dictionary of argument name', "llama3_json"),
)
"""Texts in chat templates that indicate a format, in order of precedence."""


def format_of(template: str) -> ToolFormat | None:
    """The tool call format of a chat template (Jinja source); None if it is unknown."""
    return next((FORMATS[name] for sign, name in _SIGNS if sign in template), None)
