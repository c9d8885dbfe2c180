"""Parsers of model output: reasoning, tool calls and content."""

from router.replies.dialect import THINKING_SWITCHES, Dialect, check_parsers, dialect_of
from router.replies.formats import FORMATS, Properties, ToolFormat
from router.replies.harmony import HarmonyReader, num_thought_tokens
from router.replies.json_text import closed, mended
from router.replies.reader import (
    THOUGHTS,
    Call,
    CallArguments,
    Content,
    Piece,
    ReplyReader,
    Thought,
)

__all__ = [
    "FORMATS",
    "THINKING_SWITCHES",
    "THOUGHTS",
    "Call",
    "CallArguments",
    "Content",
    "Dialect",
    "HarmonyReader",
    "Piece",
    "Properties",
    "ReplyReader",
    "Thought",
    "ToolFormat",
    "check_parsers",
    "closed",
    "dialect_of",
    "mended",
    "num_thought_tokens",
]
