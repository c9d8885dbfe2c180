"""A call's arguments, read while they are written: what is certain of them is JSON already."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

Schemas = Mapping[str, Any]
"""Schemas of one function's arguments, by their names."""


class Arguments(Protocol):
    """Reads the arguments of one call, however their text is cut.

    What it hands on is joined to a JSON object, or to the beginning of one where the text ends
    within them or turns out to be none.
    """

    @property
    def is_over(self) -> bool:
        """Whether nothing will be handed on any more."""
        ...

    @property
    def rest(self) -> str:
        """Text that is not handed on."""
        ...

    def push(self, text: str) -> str:
        """The text that the next piece makes certain."""
        ...

    def end(self) -> str:
        """The text that is certain where the input ends."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TagFormat:
    """How a family writes arguments between tags, with values that are plain text."""

    opening: re.Pattern[str]
    """Pattern of what comes before a value; its first group is the argument's name."""
    value_endings: tuple[str, ...]
    """Tags that end a value; the first of them belongs to it."""
    endings: tuple[str, ...]
    """Tags that end all arguments."""
    is_indented: bool = False
    """Whether values stand on lines of their own, whose breaks belong to the tags."""
    longest: int = 640
    """Characters that an opening has at most."""


class TaggedArguments:
    """Arguments between tags.

    A text is handed on as it comes. A value of another type, or one of some, waits for its end.

    Args:
        tags: of the family.
        schemas: of the function.
    """

    __slots__ = (
        "_buffer",
        "_has_any",
        "_is_begun",
        "_is_text",
        "_pattern",
        "_scanned",
        "_schema",
        "_schemas",
        "_tags",
        "is_over",
    )

    def __init__(self, tags: TagFormat, schemas: Schemas) -> None:
        self._tags = tags
        self._schemas = schemas
        self._buffer = ""
        self._pattern: re.Pattern[str] | None = None
        """Pattern of the end of the value under way; None where none is."""
        self._schema: Any = None
        self._is_text = False
        """Whether it is handed on as it comes."""
        self._is_begun = False
        """Whether its first character is behind us."""
        self._scanned = 0
        self._has_any = False
        self.is_over = False

    @property
    def rest(self) -> str:
        """The text behind the last argument, from the tag on that ends them."""
        return self._buffer

    def push(self, text: str) -> str:
        """The text that the next piece makes certain."""
        self._buffer += text
        told = ""
        while not self.is_over:
            more = self._between() if self._pattern is None else self._within()
            if more is None:
                break
            told += more
        return told

    def end(self) -> str:
        """Closes what is open."""
        if self.is_over:
            return ""
        value = self._buffer[: self._num_certain()]
        self._buffer, self.is_over = "", True
        return ("" if self._pattern is None else self._close(value)) + self._finish()

    def _between(self) -> str | None:
        """Goes on to the next value, or to the end; None where it takes more text."""
        tags = self._tags
        found = tags.opening.search(self._buffer)
        ends = [place for tag in tags.endings if (place := self._buffer.find(tag)) >= 0]
        if ends and (found is None or min(ends) < found.start()):
            self._buffer, self.is_over = self._buffer[min(ends) :], True
            return self._finish()
        if found is None:
            self._buffer = self._buffer[-tags.longest :]
            return None
        self._buffer = self._buffer[found.end() :]
        name = found[1].strip()
        self._schema = self._schemas.get(name)
        self._pattern = _any_of((*tags.value_endings, *tags.endings))
        self._is_text, self._is_begun, self._scanned = is_text(self._schema), False, 0
        told = ("," if self._has_any else "{") + _encode(name) + ":"
        self._has_any = True
        return told + '"' if self._is_text else told

    def _within(self) -> str | None:
        """Goes on within a value."""
        assert self._pattern is not None
        found = self._pattern.search(self._buffer, self._scanned)
        if found is not None:
            value, ending = self._buffer[: found.start()], found[0]
            is_own = ending == self._tags.value_endings[0]
            self._buffer = self._buffer[found.end() if is_own else found.start() :]
            return self._close(value)
        certain = self._num_certain()
        self._scanned = certain
        if not self._is_text or not certain:
            return None
        text, self._buffer, self._scanned = self._buffer[:certain], self._buffer[certain:], 0
        return _encode(self._without_first_break(text))[1:-1] or None

    def _num_certain(self) -> int:
        """Characters of the buffer in which no ending begins, nor the line's break before one."""
        buffer, endings = self._buffer, (*self._tags.value_endings, *self._tags.endings)
        certain = len(buffer)
        for count in range(min(max(map(len, endings)) - 1, certain), 0, -1):
            if any(ending.startswith(buffer[-count:]) for ending in endings):
                certain -= count
                break
        if self._tags.is_indented and certain and buffer[certain - 1] == "\n":
            certain -= 1
        return certain

    def _close(self, value: str) -> str:
        """The end of a value."""
        self._pattern = None
        value = self._without_first_break(value)
        if self._tags.is_indented:
            value = value.removesuffix("\n")
        if self._is_text:
            return _encode(value)[1:-1] + '"'
        return _encode(typed(value, self._schema))

    def _without_first_break(self, value: str) -> str:
        """More of a value, without the line's break that belongs to the tag before it."""
        if self._tags.is_indented and not self._is_begun and value:
            self._is_begun = True
            return value.removeprefix("\n")
        return value

    def _finish(self) -> str:
        return "}" if self._has_any else "{}"


def is_text(schema: object) -> bool:
    """Whether any plain text is a value of that schema as it stands."""
    if not isinstance(schema, Mapping):
        return True
    if isinstance(schema.get("enum"), list):
        return False
    types = _types(schema)
    return not types or ("string" in types and "null" not in types)


def typed(value: str, schema: object) -> Any:
    """An argument that is written as plain text, by its type: a string stays as it is.

    One of some values loses the white space around it, which grammars let models write.
    """
    choices = schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(choices, list) and value not in choices and value.strip() in choices:
        return value.strip()
    types = _types(schema)
    if "null" in types and value.strip() == "null":
        return None
    if not types or "string" in types:
        return value
    written = value.strip()
    if "boolean" in types and written in ("True", "False"):
        return written == "True"
    try:
        return msgspec.json.decode(written)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return value


def _types(schema: object) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    own = schema.get("type")
    types = {own} if isinstance(own, str) else set()
    if isinstance(own, list):
        types = {name for name in own if isinstance(name, str)}
    for union in ("anyOf", "oneOf"):
        branches = schema.get(union)
        for branch in branches if isinstance(branches, list) else ():
            if isinstance(branch, Mapping) and isinstance(branch.get("type"), str):
                types.add(branch["type"])
    return types


def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))


def _encode(value: Any) -> str:
    return msgspec.json.encode(value).decode()
