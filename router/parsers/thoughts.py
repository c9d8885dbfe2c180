"""ThoughtFormat: reasoning markers of model families."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ThoughtFormat:
    """A model family's reasoning markers."""

    name: str
    """Name of the format, a value of `--reasoning-parser`."""
    opening: str
    closing: str
    sign: re.Pattern[str]
    """Pattern in chat templates that indicates this format."""
    other_openings: tuple[str, ...] = ()
    """Other spellings of `opening`."""
    other_closings: tuple[str, ...] = ()
    """Other spellings of `closing`."""
    answer_openings: tuple[str, ...] = ()
    """Markers before an answer, which are dropped at its start."""
    answer_closings: tuple[str, ...] = ()
    """Markers after an answer, which are dropped if a marker also precedes the answer."""

    @property
    def openings(self) -> tuple[str, ...]:
        """All markers that start reasoning."""
        return (self.opening, *self.other_openings)

    @property
    def closings(self) -> tuple[str, ...]:
        """All markers that end reasoning."""
        return (self.closing, *self.other_closings)

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers."""
        return (*self.openings, *self.closings, *self.answer_openings, *self.answer_closings)

    @property
    def first_token(self) -> str:
        """The marker that starts reasoning, or the part of it that is a single token."""
        found = _PART.match(self.opening)
        return self.opening if found is None else found[0]

    @property
    def tokens(self) -> frozenset[str]:
        """Markers, and their parts in angle brackets; any of these may be tokens."""
        parts = (part for marker in self.markers for part in _PART.findall(marker))
        return frozenset((*self.markers, *parts))


_PART = re.compile(r"<[^<>\s]+>")

THOUGHTS: Mapping[str, ThoughtFormat] = {
    made.name: made
    for made in (
        ThoughtFormat(
            name="harmony",
            opening="<|channel|>analysis<|message|>",
            closing="<|end|>",
            sign=re.compile(r"<\|channel\|>analysis<\|message\|>"),
        ),
        ThoughtFormat(  # vLLM: seed_oss
            name="seed_oss",
            opening="<seed:think>",
            closing="</seed:think>",
            sign=re.compile("</seed:think>"),
        ),
        ThoughtFormat(  # LongCat-Flash-Thinking (vLLM: longcat)
            name="longcat",
            opening="<longcat_think>",
            closing="</longcat_think>",
            sign=re.compile("</longcat_think>"),
        ),
        ThoughtFormat(  # Command R7B, A and A+ (vLLM: cohere_command3, cohere_command4)
            name="command",
            opening="<|START_THINKING|>",
            closing="<|END_THINKING|>",
            sign=re.compile(r"<\|END_THINKING\|>|<\|START_RESPONSE\|>"),
            answer_openings=("<|START_RESPONSE|>", "<|START_TEXT|>"),
            answer_closings=("<|END_RESPONSE|>", "<|END_TEXT|>"),
        ),
        ThoughtFormat(  # Hy3 (vLLM: hy_v3)
            name="hy_v3",
            opening="<think:opensource>",
            closing="</think:opensource>",
            sign=re.compile(":opensource"),
        ),
        ThoughtFormat(  # vLLM: gemma4
            name="gemma4",
            opening="<|channel>thought",
            closing="<channel|>",
            sign=re.compile(r"<channel\|>"),
        ),
        ThoughtFormat(  # vLLM: apertus
            name="apertus",
            opening="<|inner_prefix|>",
            closing="<|inner_suffix|>",
            sign=re.compile(r"<\|inner_suffix\|>"),
        ),
        ThoughtFormat(  # vLLM: solar_open
            name="solar_open",
            opening="<|think|>",
            closing="<|end|>",
            sign=re.compile(r"<\|think\|>"),
            answer_openings=("<|begin|>assistant<|content|>", "<|content|>"),
            answer_closings=("<|end|>",),
        ),
        ThoughtFormat(
            name="mistral", opening="[THINK]", closing="[/THINK]", sign=re.compile(r"\[/THINK\]")
        ),
        ThoughtFormat(  # Hunyuan A13B and dense models (vLLM: hunyuan_a13b)
            name="hunyuan",
            opening="<think>",
            closing="</think>",
            sign=re.compile(r"(?s)\A(?=.*</think>).*<answer>"),
            answer_openings=("<answer>",),
            answer_closings=("</answer>",),
        ),
        ThoughtFormat(  # Granite 3.3, by its model card; ERNIE 4.5 (vLLM: ernie45)
            name="response",
            opening="<think>",
            closing="</think>",
            sign=re.compile(r"(?s)\A(?=.*</think>).*<response>(?:</response>|\\n)"),
            answer_openings=("<response>",),
            answer_closings=("</response>",),
        ),
        ThoughtFormat(  # Qwen3, DeepSeek, GLM, Kimi, MiniMax, OLMo 3, EXAONE 4, SmolLM3 and others
            name="think",
            opening="<think>",
            closing="</think>",
            sign=re.compile("</think>"),
        ),
        ThoughtFormat(  # Granite 3.2 (vLLM: granite)
            name="granite",
            opening="Here is my thought process:",
            closing="Here is my response:",
            sign=re.compile("Here is my thought process:"),
            other_openings=("Here's my thought process:",),
            other_closings=("Here's my response:",),
        ),
    )
}
"""Reasoning formats by name, in the order in which they are looked for in chat templates."""


def thoughts_of(template: str) -> ThoughtFormat | None:
    """The reasoning format of a chat template (Jinja source); None if it has none."""
    return next((made for made in THOUGHTS.values() if made.sign.search(template)), None)
