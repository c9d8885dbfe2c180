"""Structured output: the form of a completion, as sent from client to the worker's frontend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

MAX_GRAMMAR_BYTES = 2**20
"""Largest schema, pattern, grammar or list of choices; larger ones are refused unread."""

GrammarKind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]
KINDS: tuple[GrammarKind, ...] = get_args(GrammarKind)


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Form of a completion, of exactly one kind. Names and meanings follow vLLM.

    Raises:
        ValueError: none or several kinds are given, or one is too large, or a choice is empty.
    """

    json: str | dict[str, Any] | None = None
    """A JSON schema, as text or as a mapping."""
    json_object: bool = False
    """True for any JSON object."""
    regex: str | None = None
    """A regular expression that the whole text matches."""
    choice: tuple[str, ...] | None = None
    """Texts of which the completion is one."""
    grammar: str | None = None
    """A context-free grammar: EBNF as in GBNF (`root ::= ...`), or Lark (`start: ...`)."""
    structural_tag: str | dict[str, Any] | None = None
    """Free text with structures between tags: xgrammar's structural tag, as text or mapping."""
    disable_any_whitespace: bool = False
    """Whether JSON has no line breaks and indents."""

    def __post_init__(self) -> None:
        for name in ("json", "structural_tag"):
            value = getattr(self, name)
            if isinstance(value, Mapping):
                msgspec.structs.force_setattr(self, name, msgspec.json.encode(value).decode())
        if self.choice is not None:
            msgspec.structs.force_setattr(self, "choice", tuple(self.choice))
            if not self.choice or not all(self.choice):
                raise ValueError("choice must hold texts, none of them empty")
        given = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            found = "none" if not given else " and ".join(given)
            raise ValueError(f"exactly one of {', '.join(KINDS)} must be given, got {found}")
        size = len(self.text.encode())
        if size > MAX_GRAMMAR_BYTES:
            raise ValueError(f"{self.kind} has {size} bytes, at most {MAX_GRAMMAR_BYTES} are taken")

    @property
    def kind(self) -> GrammarKind:
        """The kind that is given."""
        return next(kind for kind in KINDS if getattr(self, kind) not in (None, False))

    @property
    def text(self) -> str:
        """Text of the schema, pattern or grammar; choices as a JSON list; empty for json_object."""
        value = getattr(self, self.kind)
        if isinstance(value, str):
            return value
        return "" if value is True else msgspec.json.encode(value).decode()


class ThoughtTokens(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens around a thought (reasoning) that precedes the structured part of a completion."""

    opening: int
    """Token that begins a thought."""
    closing: int
    """Token that ends a thought; the structured part begins after it."""
    before: tuple[int, ...] = ()
    """Tokens that must come right before `closing` for it to end the thought."""
    is_open: bool = False
    """Whether the prompt ends within a thought; else the first token may begin one."""
