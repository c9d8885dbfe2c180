"""Server-sent events, read at the least cost that a load client can do with."""

from __future__ import annotations

import re

_BREAK = re.compile(rb"\r?\n\r?\n")
# The text of a completion, the content of a chat delta, or its reasoning, when it is not empty.
# Quotes inside JSON strings are escaped, so generated text cannot imitate a key.
_TEXT = re.compile(rb'"(?:text|content|reasoning_content|reasoning)":\s*"(?!")')
_CHOICES = re.compile(rb'"choices":\s*\[\s*\{')
_ROLE = re.compile(rb'"role":\s*"')
_USAGE = re.compile(rb'"usage":\s*\{')


class EventScanner:
    """Splits a byte stream into the data of its events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events completed by `chunk`; comments and other fields are dropped."""
        *events, self._rest = _BREAK.split(self._rest + chunk)
        return [data for event in events if (data := _data(event))]


def has_text(data: bytes) -> bool:
    """Whether a streamed chunk carries visible text, without decoding it."""
    return _TEXT.search(data) is not None


def has_choices(data: bytes) -> bool:
    """Whether a streamed chunk is about a completion, and not only about counts."""
    return _CHOICES.search(data) is not None


def opens_chat(data: bytes) -> bool:
    """Whether a streamed chunk names a role and has no text; servers may send it before a token."""
    return _ROLE.search(data) is not None and not has_text(data)


def has_usage(data: bytes) -> bool:
    """Whether a streamed chunk carries token counts, without decoding it."""
    return _USAGE.search(data) is not None


def _data(event: bytes) -> bytes:
    if event.startswith(b"data:") and b"\n" not in event:
        return event[5:].strip()
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)
