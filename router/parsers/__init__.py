"""Parsers of model output: reasoning, tool calls and content."""

from router.parsers.calls import Properties
from router.parsers.dialect import (
    BUDGET_VARIABLE,
    THINKING_SWITCHES,
    Dialect,
    check_parsers,
    dialect_of,
)
from router.parsers.formats import FORMATS, CallIds, ToolFormat
from router.parsers.harmony import HarmonyParser, num_thought_tokens
from router.parsers.json_text import closed, mended
from router.parsers.output_parser import (
    Call,
    CallArguments,
    Content,
    OutputParser,
    Piece,
    Thought,
)
from router.parsers.thoughts import THOUGHTS

__all__ = [
    "BUDGET_VARIABLE",
    "FORMATS",
    "THINKING_SWITCHES",
    "THOUGHTS",
    "Call",
    "CallArguments",
    "CallIds",
    "Content",
    "Dialect",
    "HarmonyParser",
    "OutputParser",
    "Piece",
    "Properties",
    "Thought",
    "ToolFormat",
    "check_parsers",
    "closed",
    "dialect_of",
    "mended",
    "num_thought_tokens",
]
