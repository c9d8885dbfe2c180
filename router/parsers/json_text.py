"""JsonObject: incremental parser of a JSON object."""

from __future__ import annotations

import re
from typing import Literal

MAX_DEPTH = 128
"""Maximum depth of nested objects and arrays."""

_TEXT = re.compile(
    r"""(?: [^"\\\x00-\x1f]+
    | \\["\\/bfnrt]
    | \\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}
    | \\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}  # half a surrogate pair is invalid
    )+""",
    re.VERBOSE,
)
_ESCAPE_BEGUN = re.compile(
    r"\\(?:u(?:[0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?))?"
)
_CONTROLS = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_SPACE = re.compile(r"[ \t\r\n]*")
_VALUE = re.compile(
    r"(?:true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)(?=[ \t\r\n,\]}])"
)
_MAX_VALUE = 512
"""Maximum length of a number in characters."""
_CLOSINGS = {"{": "}", "[": "]"}

Awaited = Literal["object", "value", "first value", "key", "first key", "colon", "comma"]


class JsonObject:
    """Parser of one JSON object, which returns its valid text without whitespace between tokens.

    The returned text, concatenated, is always the beginning of a valid object. Unescaped line
    breaks in strings, as models often write them, are escaped.
    """

    __slots__ = ("_awaited", "_in_text", "_open", "_pending", "is_broken", "num_given", "sound")

    def __init__(self) -> None:
        self._pending = ""
        """Text that is not returned yet, since it may be an incomplete token."""
        self._open = ""
        """Open braces and brackets."""
        self._awaited: Awaited = "object"
        """Next token that the grammar expects."""
        self._in_text = False
        """Whether the text is within a string."""
        self.is_broken = False
        """Whether the text is not valid JSON; `rest` starts with the invalid part."""
        self.num_given = 0
        """Number of characters returned."""
        self.sound = 0
        """Number of returned characters up to the last position at which `closings` would complete
        the object: the end of a value, or the start of an object or array."""

    @property
    def is_complete(self) -> bool:
        """Whether the object has ended; `rest` is the text after it."""
        return self.num_given > 0 and not self._open

    @property
    def is_over(self) -> bool:
        """Whether the object has ended or is malformed: no more text will be returned."""
        return self.is_broken or self.is_complete

    @property
    def rest(self) -> str:
        """Text that was not returned: text after the object, malformed text, or an incomplete
        token."""
        return self._pending

    @property
    def closings(self) -> str:
        """Closing braces and brackets for all open ones."""
        return "".join(_CLOSINGS[opening] for opening in reversed(self._open))

    @property
    def is_at_name(self) -> bool:
        """Whether the next token can only be a member's name, or the end of the object."""
        return self._awaited in ("key", "first key") and not self._in_text

    @property
    def is_in_value(self) -> bool:
        """Whether the text ends within a string that is a value."""
        return self._in_text and self._awaited in ("value", "first value")

    def push(self, text: str) -> str:
        """Parses more text; returns the part of the object that is final so far."""
        text, at, valid = self._pending + text, 0, ""
        while not self.is_over and at < len(text):
            if not self._in_text:
                at = _SPACE.match(text, at).end()  # type: ignore[union-attr]  # always matches
            length, token = self._text(text, at) if self._in_text else self._token(text, at)
            if not length:
                break
            at += length
            valid += token
            self.num_given += len(token)
            if self._awaited in ("comma", "first value", "first key") and not self._in_text:
                self.sound = self.num_given
        self._pending = text[at:]
        return valid

    def end(self) -> str:
        """Ends the text; returns nothing, since an incomplete token is dropped."""
        return ""

    def _text(self, text: str, at: int) -> tuple[int, str]:
        """Length of the next part of a string, and the text to return for it."""
        if found := _TEXT.match(text, at):
            return len(found[0]), found[0]
        char = text[at]
        if char == '"':
            self._in_text = False
            self._awaited = "colon" if self._awaited in ("key", "first key") else "comma"
            return 1, char
        if char < " ":
            return 1, _CONTROLS.get(char, f"\\u{ord(char):04x}")
        self.is_broken = _ESCAPE_BEGUN.fullmatch(text, at) is None
        return 0, ""

    def _token(self, text: str, at: int) -> tuple[int, str]:
        """Length of the next token (only the quote, for strings), and the text to return for it."""
        char, awaited = text[at : at + 1], self._awaited
        if char == '"' and awaited in ("key", "first key", "value", "first value"):
            self._in_text = True
        elif char == ":" and awaited == "colon":
            self._awaited = "value"
        elif char == "," and awaited == "comma":
            self._awaited = "key" if self._open[-1] == "{" else "value"
        elif char in ("{", "[") and self._may_open(char):
            self._open += char
            self._awaited = "first key" if char == "{" else "first value"
        elif char and char in "}]" and self._may_close(char):
            self._open, self._awaited = self._open[:-1], "comma"
        elif char and awaited in ("value", "first value"):
            return self._scalar(text, at)
        else:
            self.is_broken = char != ""
            return 0, ""
        return 1, char

    def _may_open(self, char: str) -> bool:
        if self._awaited == "object":
            return char == "{"
        return self._awaited in ("value", "first value") and len(self._open) < MAX_DEPTH

    def _may_close(self, char: str) -> bool:
        if char != _CLOSINGS.get(self._open[-1:]):
            return False
        return self._awaited in ("comma", "first key", "first value")

    def _scalar(self, text: str, at: int) -> tuple[int, str]:
        rest = text[at : at + _MAX_VALUE]
        if found := _VALUE.match(rest):
            self._awaited = "comma"
            return len(found[0]), found[0]
        self.is_broken = len(rest) == _MAX_VALUE or not _may_be_scalar(rest)
        return 0, ""


_NUMBER_BEGUN = re.compile(
    r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)?|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?[eE][+-]?[0-9]*"
)


def _may_be_scalar(text: str) -> bool:
    """Whether a text may be the start of a number, true, false or null."""
    is_word = any(word.startswith(text) for word in ("true", "false", "null"))
    return is_word or _NUMBER_BEGUN.fullmatch(text) is not None


def closed(text: str) -> str:
    """Completes the beginning of an object, returned by JsonObject, keeping all complete values."""
    parser = JsonObject()
    parser.push(text)
    return text[: parser.sound] + parser.closings if parser.sound else "{}"


def mended(text: str) -> str | None:
    """Completes a text that was cut off within an object; None for other texts.

    A truncated string ends at the cut. Other incomplete values, and names without a value, are
    dropped.
    """
    parser = JsonObject()
    beginning = parser.push(text)
    if not beginning or parser.is_broken or parser.is_over:
        return None
    if parser.is_in_value:
        return f'{beginning}"{parser.closings}'
    return beginning[: parser.sound] + parser.closings
