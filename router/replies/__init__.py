"""What models write besides plain answers: thoughts, and calls of functions."""

from router.replies.dialect import Dialect, check_parsers, dialect_of
from router.replies.formats import FORMATS, Properties, ToolCall, ToolFormat
from router.replies.reader import THOUGHTS, Content, Piece, ReplyReader, Thought

__all__ = [
    "FORMATS",
    "THOUGHTS",
    "Content",
    "Dialect",
    "Piece",
    "Properties",
    "ReplyReader",
    "Thought",
    "ToolCall",
    "ToolFormat",
    "check_parsers",
    "dialect_of",
]
