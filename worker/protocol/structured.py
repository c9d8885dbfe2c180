"""Structured output: the format of a completion, sent from the client to the worker's frontend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

MAX_GRAMMAR_BYTES = 2**20
"""Maximum size in bytes of a schema, pattern, grammar or list of choices. Larger ones are rejected
without parsing them."""

GrammarKind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]
KINDS: tuple[GrammarKind, ...] = get_args(GrammarKind)


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Format of a completion: exactly one kind of format is set. Names and meanings follow vLLM.

    Raises:
        ValueError: none or several kinds are given, one is too large, or a choice is empty.
    """

    json: str | dict[str, Any] | None = None
    """JSON schema, as text or as a mapping."""
    json_object: bool = False
    """Whether to allow any JSON object."""
    regex: str | None = None
    """Regular expression that the whole text must match."""
    choice: tuple[str, ...] | None = None
    """Allowed texts; the completion must be one of them."""
    grammar: str | None = None
    """Context-free grammar: EBNF as in GBNF (`root ::= ...`), or Lark (`start: ...`)."""
    structural_tag: str | dict[str, Any] | None = None
    """Free text with structured parts between tags, as an xgrammar structural tag: text or a
    mapping."""
    disable_any_whitespace: bool = False
    """Whether to generate JSON without line breaks and indentation."""

    def __post_init__(self) -> None:
        for name in ("json", "structural_tag"):
            value = getattr(self, name)
            if isinstance(value, Mapping):
                msgspec.structs.force_setattr(self, name, msgspec.json.encode(value).decode())
        if self.choice is not None:
            msgspec.structs.force_setattr(self, "choice", tuple(self.choice))
            if not self.choice or not all(self.choice):
                raise ValueError("choice must be a non-empty list of non-empty strings")
        given = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            found = "none" if not given else " and ".join(given)
            raise ValueError(f"exactly one of {', '.join(KINDS)} must be set, got {found}")
        size = len(self.text.encode())
        if size > MAX_GRAMMAR_BYTES:
            raise ValueError(f"{self.kind} has {size} bytes; the maximum is {MAX_GRAMMAR_BYTES}")

    @property
    def kind(self) -> GrammarKind:
        """Name of the kind that is set."""
        return next(kind for kind in KINDS if getattr(self, kind) not in (None, False))

    @property
    def text(self) -> str:
        """Schema, pattern or grammar as text; choices as a JSON list; empty for json_object."""
        value = getattr(self, self.kind)
        if isinstance(value, str):
            return value
        return "" if value is True else msgspec.json.encode(value).decode()


class ThoughtTokens(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens around reasoning that has a limit or precedes the structured part of a completion."""

    opening: int
    """Token that begins reasoning."""
    closing: int
    """Token that ends reasoning; the structured part begins after it."""
    before: tuple[int, ...] = ()
    """Tokens that must directly precede `closing` for it to end the reasoning."""
    leading: tuple[int, ...] = ()
    """Tokens inserted in front of `before` if the end of reasoning is enforced."""
    budget: int | None = None
    """Maximum number of reasoning tokens, excluding those that begin and end it; None for no
    limit."""
    is_open: bool = False
    """Whether the prompt ends within reasoning; otherwise the first token may begin it."""
