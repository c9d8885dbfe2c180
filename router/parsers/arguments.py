"""Incremental parsers of a tool call's arguments, which convert them to JSON as they stream in."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from router.parsers.calls import python_json
from worker.protocol.argument_types import Schemas


class Arguments(Protocol):
    """Parser of the arguments of one call.

    The returned JSON, concatenated, is an object, or the beginning of one if the text ends within
    the arguments or is malformed. It does not depend on how the text is split.
    """

    @property
    def is_over(self) -> bool:
        """Whether the arguments have ended or are malformed: no more JSON will be returned."""
        ...

    @property
    def rest(self) -> str:
        """Pushed text that is not part of the arguments, or not yet parsed."""
        ...

    def push(self, text: str) -> str:
        """Parses more text; returns the JSON that is final so far."""
        ...

    def end(self) -> str:
        """Ends the text; returns the remaining JSON."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TagFormat:
    """A model family's tags around arguments whose values are plain text."""

    opening: re.Pattern[str]
    """Pattern of the tags before a value. Its first group is the argument's name; a second one is
    `true` for text, `false` for JSON, and None for a value of the type in the schema."""
    value_endings: tuple[str, ...]
    """Tags that end a value: first its closing tag, then tags that start the next element."""
    endings: tuple[str, ...]
    """Tags that end all arguments."""
    is_indented: bool = False
    """Whether values are on separate lines, whose line breaks are then part of the tags."""
    longest: int = 640
    """Maximum number of characters that `opening` matches."""


_WRITTEN = {
    "true": {"type": "string"},
    "false": {"type": ["null", "boolean", "integer", "number", "array", "object"]},
}
"""Schema of a value, by its tag's `string` attribute: "true" for text, "false" for JSON."""


class TaggedArguments:
    """Parser of arguments between tags.

    Strings are returned as they stream in. Values of other types, and of enums, are returned when
    complete.

    Args:
        tags: the tags of the model family.
        schemas: schemas of the function's arguments.
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
        """Text that is not parsed yet."""
        self._pattern: re.Pattern[str] | None = None
        """Pattern of the end of the current value; None between values."""
        self._schema: Any = None
        """Schema of the current value."""
        self._is_text = False
        """Whether the current value is returned as it streams in."""
        self._is_begun = False
        """Whether the first character of the current value has been parsed."""
        self._scanned = 0
        """Number of leading buffer characters in which no end of the value starts."""
        self._has_any = False
        """Whether an argument has been parsed."""
        self.is_over = False
        """Whether the arguments have ended."""

    @property
    def rest(self) -> str:
        """Text after the last argument, starting with the tag that ends the arguments."""
        return self._buffer

    def push(self, text: str) -> str:
        """Parses more text; returns the JSON that is final so far."""
        self._buffer += text
        json_text = ""
        while not self.is_over:
            more = self._between() if self._pattern is None else self._within()
            if more is None:
                break
            json_text += more
        return json_text

    def end(self) -> str:
        """Ends the text; returns JSON that closes the current value and the object."""
        if self.is_over:
            return ""
        value = self._buffer[: self._num_certain()]
        self._buffer, self.is_over = "", True
        return ("" if self._pattern is None else self._close(value)) + self._finish()

    def _between(self) -> str | None:
        """Parses up to the next value or the end of the arguments; None if more text is needed."""
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
        written = found[2] if tags.opening.groups > 1 else None
        self._schema = _WRITTEN[written] if written else self._schemas.get(name)
        self._pattern = _any_of((*tags.value_endings, *tags.endings))
        self._is_text, self._is_begun, self._scanned = is_text(self._schema), False, 0
        json_text = ("," if self._has_any else "{") + _encode(name) + ":"
        self._has_any = True
        return json_text + '"' if self._is_text else json_text

    def _within(self) -> str | None:
        """Parses within a value; None if more text is needed."""
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
        """Number of leading buffer characters that are certainly part of the value: those before a
        possible end, and before the line break that precedes it."""
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
        """Ends the value with its last text; returns its JSON."""
        self._pattern = None
        value = self._without_first_break(value)
        if self._tags.is_indented:
            value = value.removesuffix("\n")
        if self._is_text:
            return _encode(value)[1:-1] + '"'
        return _encode(typed(value, self._schema))

    def _without_first_break(self, value: str) -> str:
        """Text of a value without the line break that is part of the preceding tag."""
        if self._tags.is_indented and not self._is_begun and value:
            self._is_begun = True
            return value.removeprefix("\n")
        return value

    def _finish(self) -> str:
        return "}" if self._has_any else "{}"


def is_text(schema: object) -> bool:
    """Whether any text is a valid string for the schema, so that no conversion is needed."""
    if not isinstance(schema, Mapping):
        return True
    if isinstance(schema.get("enum"), list):
        return False
    types = _types(schema)
    return not types or ("string" in types and "null" not in types)


def typed(value: str, schema: object) -> Any:
    """Converts an argument written as plain text to a JSON value, by its schema.

    Strings are unchanged; enum values are stripped of surrounding whitespace, which grammars
    allow.
    """
    choices = schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(choices, list):
        return _chosen(value, choices)
    types = _types(schema)
    if "null" in types and value.strip() == "null":
        return None
    if not types or "string" in types:
        return value
    written = value.strip()
    if "boolean" in types and written in ("True", "False"):
        return written == "True"
    return _decoded(written, value)


def _chosen(value: str, choices: list[Any]) -> Any:
    """The enum value that the text represents; the text itself if it represents none."""
    for text in (value, value.strip()):
        if text in choices:
            return text
    decoded = _decoded(value.strip(), value)
    # Compared as text, since 1 is not true.
    if any(_encode(decoded) == _encode(choice) for choice in choices):
        return decoded
    return value


def _decoded(written: str, other: str) -> Any:
    """The decoded JSON, or Python list or dictionary; `other` if `written` is none of these."""
    try:
        return msgspec.json.decode(written)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        pass
    try:  # a number too large for floats is still valid JSON
        json.loads(written, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        literal = python_json(written)
        return other if literal is None else msgspec.Raw(literal.encode())
    return msgspec.Raw(written.encode())


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _types(schema: object) -> set[str]:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    names = [kind] if isinstance(kind, str) else kind
    return set(names) if isinstance(names, list) else set()


def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))


def _encode(value: Any) -> str:
    return msgspec.json.encode(value).decode()
