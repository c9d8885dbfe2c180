"""What a completion must conform to, as it travels from the client to the worker's frontend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

MAX_GRAMMAR_BYTES = 2**20
"""Of a schema, pattern, grammar or list of choices; larger ones are refused unseen."""

GrammarKind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]
KINDS: tuple[GrammarKind, ...] = get_args(GrammarKind)


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The form of a completion: exactly one of the kinds. Names and meanings follow vLLM.

    Raises:
        ValueError: none or several kinds are given, or one is too large or of no use.
    """

    json: str | dict[str, Any] | None = None
    """A JSON schema, as text or as a mapping."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """A regular expression for the whole text."""
    choice: tuple[str, ...] | None = None
    """One of these texts."""
    grammar: str | None = None
    """A context-free grammar: EBNF as in GBNF (`root ::= ...`), or Lark (`start: ...`)."""
    structural_tag: str | dict[str, Any] | None = None
    """Free text with structures between tags: xgrammar's structural tag, as text or mapping."""
    disable_any_whitespace: bool = False
    """JSON in its shortest form, without line breaks and indents."""

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
        """Which of the kinds is given."""
        return next(kind for kind in KINDS if getattr(self, kind) not in (None, False))

    @property
    def text(self) -> str:
        """The schema, pattern or grammar; choices as a JSON list."""
        value = getattr(self, self.kind)
        if isinstance(value, str):
            return value
        return "" if value is True else msgspec.json.encode(value).decode()


class ThoughtTokens(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What stands around a thought that comes before the form of a completion."""

    opening: int
    """The token that begins one."""
    closing: int
    """The token that ends it: the form begins behind it."""
    before: tuple[int, ...] = ()
    """Tokens that come right before that one where it ends the thought; elsewhere it does not."""
    is_open: bool = False
    """Whether the prompt ends within one; else the first token may begin one."""
