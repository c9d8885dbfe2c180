"""GemmaArguments: incremental parser of Gemma 4's arguments, whose strings are not escaped."""

from __future__ import annotations

import re

import msgspec

from router.parsers.json_text import JsonObject

QUOTE = '<|"|>'
"""Marker around strings."""

_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[^\s{}\[\],:<][^{}\[\],:<]{0,255}")
"""Pattern of names, and of values other than strings."""
_MAX_WORD = 256
"""Maximum length in characters of a name, or of a value that is not a string."""


class GemmaArguments:
    """Parser of `{name:<|"|>text<|"|>,names:[1,true]}`, with the interface of `Arguments`.

    The text is converted to JSON token by token: strings as they stream in, names and other values
    when complete. A word that is not a JSON value is a string.
    """

    __slots__ = ("_in_text", "_json", "_pending")

    def __init__(self) -> None:
        self._json = JsonObject()
        """Parser of the converted text."""
        self._pending = ""
        """Text that is not converted yet."""
        self._in_text = False
        """Whether the text is within a string."""

    @property
    def is_over(self) -> bool:
        """Whether the arguments have ended or are malformed."""
        return self._json.is_over

    @property
    def rest(self) -> str:
        """Pushed text that is not part of the arguments, or not yet parsed."""
        return self._pending

    def push(self, text: str) -> str:
        """Parses more text; returns the JSON that is final so far."""
        text, at, valid = self._pending + text, 0, ""
        while not self.is_over:
            found = self._text(text, at) if self._in_text else self._token(text, at)
            if found is None:
                break
            end, token = found
            valid += self._json.push(token)
            if self._json.is_broken:
                break
            at = end
        self._pending = text[at:]
        return valid

    def end(self) -> str:
        """Ends the text; returns nothing, since an incomplete token is dropped."""
        return ""

    def _text(self, text: str, at: int) -> tuple[int, str] | None:
        """Index after the next part of a string, and its JSON; None if more text is needed."""
        place = text.find(QUOTE, at)
        if place == at:
            self._in_text = False
            return at + len(QUOTE), '"'
        end = place if place >= 0 else len(text) - _num_begun(text[at:])
        return (end, msgspec.json.encode(text[at:end]).decode()[1:-1]) if end > at else None

    def _token(self, text: str, at: int) -> tuple[int, str] | None:
        """Index after the next token, and its JSON; None if more text is needed."""
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]  # always matches
        if text.startswith(QUOTE, at):
            self._in_text = True
            return at + len(QUOTE), '"'
        if QUOTE.startswith(text[at : at + len(QUOTE)]):
            return None
        word = _WORD.match(text, at)
        if word is None:
            return at + 1, text[at]
        if word.end() == len(text) and len(word[0]) < _MAX_WORD:
            return None
        written = word[0].rstrip()
        if self._json.is_at_name or not _is_json(written):
            written = msgspec.json.encode(written).decode()
        # The space ends a number, which JsonObject would otherwise hold back.
        return word.end(), f"{written} "


def _num_begun(text: str) -> int:
    """Number of characters at the end of a text that may start a quote."""
    lengths = range(min(len(QUOTE) - 1, len(text)), 0, -1)
    return next((length for length in lengths if QUOTE.startswith(text[-length:])), 0)


def _is_json(word: str) -> bool:
    """Whether a word is a number, true, false or null."""
    try:
        value = msgspec.json.decode(word)
    except (msgspec.DecodeError, UnicodeError):
        return False
    return not isinstance(value, str)
