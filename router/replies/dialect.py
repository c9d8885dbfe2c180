"""How one model marks thoughts and calls, as its chat template tells or the server was told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from router.replies.formats import FORMATS, ToolFormat, format_of
from router.replies.reader import THOUGHTS, ThoughtFormat, thoughts_of
from worker.wire.structured import ThoughtTokens
from worker.wire.tokenizer import Tokenizer

T = TypeVar("T")

NONE = "none"
"""As the name of a parser: there is none, whatever the template holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """What a model writes besides plain answers."""

    tools: ToolFormat | None = None
    """Of calls; None where it is not known."""
    forced: ToolFormat = FORMATS["json"]
    """In which calls are forced."""
    thoughts: ThoughtFormat | None = None
    """Of thoughts; None where there are none."""
    thought_tokens: ThoughtTokens | None = None
    """What begins and ends them; None where these are no tokens of their own."""
    special: frozenset[str] = frozenset()
    """Markers that are special tokens: they must not be left out of the text."""

    @property
    def short_ids(self) -> bool:
        """Whether its template takes ids of calls that are nine letters and digits alone."""
        return self.tools is not None and self.tools.short_ids


def dialect_of(tokenizer: Tokenizer, tool_parser: str = "", reasoning_parser: str = "") -> Dialect:
    """The dialect of a model.

    Args:
        tokenizer: with the chat template.
        tool_parser: name of a format of calls, `none`, or empty for what the template tells.
        reasoning_parser: the same for thoughts.

    Raises:
        ValueError: there is no format of that name.
    """
    template = "" if tokenizer.chat_template is None else tokenizer.chat_template.source
    tools = _chosen(FORMATS, tool_parser, format_of(template))
    thoughts = _chosen(THOUGHTS, reasoning_parser, thoughts_of(template))
    special = tokenizer.special_tokens_named(
        (tools.markers if tools is not None else frozenset())
        | (frozenset((thoughts.opening, thoughts.closing)) if thoughts is not None else frozenset())
    )
    # Grammars do not yield special tokens: a call with such markers cannot be forced.
    can_force = tools is not None and tools.before and not special & tools.markers
    return Dialect(
        tools=tools,
        forced=tools if tools is not None and can_force else FORMATS["json"],
        thoughts=thoughts,
        thought_tokens=None if thoughts is None else _thought_tokens(thoughts, tokenizer),
        special=special,
    )


def _thought_tokens(thoughts: ThoughtFormat, tokenizer: Tokenizer) -> ThoughtTokens | None:
    opening, closing = (tokenizer.token_id(m) for m in (thoughts.opening, thoughts.closing))
    if opening is None or closing is None:
        return None
    return ThoughtTokens(opening=opening, closing=closing)


def check_parsers(tool_parser: str, reasoning_parser: str) -> None:
    """Raises ValueError where there is no format of such a name; empty names are some."""
    _chosen(FORMATS, tool_parser, None)
    _chosen(THOUGHTS, reasoning_parser, None)


def _chosen(formats: Mapping[str, T], name: str, found: T | None) -> T | None:
    """The format of that name; what was found in the template where there is no name."""
    if not name:
        return found
    if name == NONE:
        return None
    if name not in formats:
        known = ", ".join((*formats, NONE))
        raise ValueError(f"there is no parser {name!r} of model output: choose from {known}")
    return formats[name]
