"""Dialect: a model's formats of reasoning and tool calls, from its chat template or options."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from router.parsers.calls import Properties
from router.parsers.formats import FORMATS, CallIds, ToolFormat, format_of
from router.parsers.harmony import END, FINAL, MARKERS, MESSAGE, START, STOPS, HarmonyParser
from router.parsers.output_parser import OutputParser
from router.parsers.response_template import thoughts_of_response, tools_of_response
from router.parsers.thoughts import THOUGHTS, ThoughtFormat, thoughts_of
from worker.protocol.structured import ThoughtTokens
from worker.protocol.text.chat_template import ChatTemplate
from worker.protocol.text.tokenizer import Tokenizer

T = TypeVar("T")

logger = logging.getLogger(__name__)

_ANY = ({"role": "user", "content": "Hello"},)

THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Chat template variables that enable reasoning: one for Qwen and GLM, one for DeepSeek and
Granite."""
BUDGET_VARIABLE = "thinking_budget"
"""Seed-OSS's chat template variable for the maximum number of reasoning tokens; 0 for no reasoning.
"""
NONE = "none"
"""Parser name that disables parsing, regardless of the template."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """The formats of reasoning and tool calls in a model's output."""

    tools: ToolFormat | None = None
    """Format of tool calls; None if the model makes no calls, or they are not parsed."""
    forced: ToolFormat = FORMATS["json"]
    """Format of calls enforced by structured output."""
    thoughts: ThoughtFormat | None = None
    """Format of reasoning; None if the model does not reason."""
    thought_tokens: ThoughtTokens | None = None
    """Tokens that start and end reasoning; None if these markers are not single tokens."""
    has_opened_thoughts: bool = False
    """Whether prompts end with the marker that starts reasoning, if reasoning is enabled."""
    special: frozenset[str] = frozenset()
    """Markers that are special tokens, which skip_special_tokens must not remove."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, besides the model's EOS tokens."""

    @property
    def is_harmony(self) -> bool:
        """Whether the model uses harmony, the format of gpt-oss."""
        return self.thoughts is THOUGHTS["harmony"]

    @property
    def has_single_calls(self) -> bool:
        """Whether the chat template supports only one call per message."""
        return self.tools is not None and self.tools.has_single_calls

    @property
    def call_ids(self) -> CallIds:
        """Form of call ids in the chat template."""
        return self.tools.ids if self.tools is not None else "any"

    def opens_thought(self, prompt: str, begun: str) -> bool:
        """Whether the completion starts within reasoning; in harmony, within a header.

        Args:
            prompt: the end of the prompt.
            begun: the assistant message that the model continues; empty if there is none.
        """
        assert self.thoughts is not None
        if self.is_harmony:
            return not begun and prompt.endswith(f"{START}assistant")
        openings, closings = self.thoughts.openings, self.thoughts.closings
        if prompt.endswith(openings):
            return True
        return max(map(begun.rfind, openings)) > max(map(begun.rfind, closings))

    def new_parser(
        self,
        *,
        tools: ToolFormat | None,
        properties: Properties,
        is_thinking: bool,
        single_call: bool,
    ) -> OutputParser | HarmonyParser:
        """Creates a parser for one completion.

        Args:
            tools: format of calls; None if calls are not parsed.
            properties: schemas of the functions' arguments.
            is_thinking: whether the prompt ends within reasoning; in harmony, within a header.
            single_call: whether only the first call is returned.
        """
        if not self.is_harmony:
            return OutputParser(
                thoughts=self.thoughts,
                is_thinking=is_thinking,
                tools=tools,
                properties=properties,
                single_call=single_call,
            )
        reads_calls = tools is FORMATS["harmony"]
        answer = OutputParser(
            thoughts=None,
            is_thinking=False,
            tools=None if reads_calls else tools,
            properties=properties,
            single_call=single_call,
        )
        return HarmonyParser(
            is_header=is_thinking,
            properties=properties,
            reads_calls=reads_calls,
            answer=answer,
            single_call=single_call,
        )


def dialect_of(tokenizer: Tokenizer, tool_parser: str = "", reasoning_parser: str = "") -> Dialect:
    """The dialect of a model.

    Args:
        tokenizer: tokenizer with the chat template.
        tool_parser: name of a tool call format, `none`, or empty to detect it in the template.
        reasoning_parser: the same for reasoning.

    Raises:
        ValueError: there is no format with that name.
    """
    template = "" if tokenizer.chat_template is None else tokenizer.chat_template.source
    response = tokenizer.response_template
    tools = _chosen(FORMATS, tool_parser, _tools_of(tokenizer.chat_template, response))
    thoughts = thoughts_of(template) or thoughts_of_response(response)
    thoughts = _chosen(THOUGHTS, reasoning_parser, thoughts)
    is_harmony = thoughts is THOUGHTS["harmony"]
    if tools is FORMATS["harmony"] and not is_harmony:
        tools = None  # harmony's headers distinguish calls and reasoning
    special = tokenizer.special_tokens_named(
        MARKERS
        if is_harmony
        else (tools.markers if tools is not None else frozenset())
        | (thoughts.tokens if thoughts is not None else frozenset())
    )
    # Grammars do not generate special tokens, so calls with such markers cannot be enforced.
    can_force = tools is not None and tools.before and not special & tools.markers
    return Dialect(
        tools=tools,
        forced=tools if tools is not None and can_force else FORMATS["json"],
        thoughts=thoughts,
        thought_tokens=None if thoughts is None else _thought_tokens(thoughts, tokenizer),
        has_opened_thoughts=thoughts is not None and _opens(tokenizer.chat_template, thoughts),
        special=special,
        stop_token_ids=_ids_of(STOPS, tokenizer) if is_harmony else (),
    )


def _tools_of(template: ChatTemplate | None, response: object) -> ToolFormat | None:
    """The tool call format of a chat template, or of the checkpoint's response template; JSON lists
    if the chat template has tools in an unknown format."""
    if template is None:
        return None
    found = format_of(template.source) or tools_of_response(response)
    if found is not None or not template.reads("tools"):
        return found
    logger.warning(
        "unknown tool call format in the chat template: only JSON lists are parsed as tool calls; "
        "set --tool-call-parser to the model's format"
    )
    return FORMATS["json"]


def _opens(template: ChatTemplate | None, thoughts: ThoughtFormat) -> bool:
    """Whether prompts end within reasoning if reasoning is enabled."""
    if template is None:
        return False
    switches: dict[str, Any] = dict.fromkeys(THINKING_SWITCHES, True)
    try:
        prompt = template.render(_ANY, **switches)
    except ValueError:  # the template rejects these messages
        return False
    return prompt.rstrip().endswith(thoughts.openings)


def _thought_tokens(thoughts: ThoughtFormat, tokenizer: Tokenizer) -> ThoughtTokens | None:
    if thoughts is THOUGHTS["harmony"]:
        *before, last = tokenizer.encode(FINAL, add_special_tokens=False)
        if last != tokenizer.token_id(MESSAGE):
            return None
        leading = tokenizer.encode(f"{END}{START}assistant", add_special_tokens=False)
        return ThoughtTokens(
            opening=before[0], closing=last, before=tuple(before), leading=tuple(leading)
        )
    opening, closing = (tokenizer.token_id(m) for m in (thoughts.first_token, thoughts.closing))
    if opening is None or closing is None:
        return None
    return ThoughtTokens(opening=opening, closing=closing)


def _ids_of(markers: Sequence[str], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Token ids of the markers that are single tokens; other markers are omitted."""
    ids = (tokenizer.token_id(marker) for marker in markers)
    return tuple(token_id for token_id in ids if token_id is not None)


def check_parsers(tool_parser: str, reasoning_parser: str) -> None:
    """Raises ValueError for unknown format names; empty names are valid."""
    _chosen(FORMATS, tool_parser, None)
    _chosen(THOUGHTS, reasoning_parser, None)


def _chosen(formats: Mapping[str, T], name: str, found: T | None) -> T | None:
    """The format with this name; None for `none`; `found`, the chat template's format, if the name
    is empty."""
    if not name:
        return found
    if name == NONE:
        return None
    if name not in formats:
        known = ", ".join((*formats, NONE))
        raise ValueError(f"unknown parser {name!r}: choose from {known}")
    return formats[name]
