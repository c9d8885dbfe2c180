"""Server-sent events, read at the least cost that a load client can do with."""

from __future__ import annotations

import re

_BREAK = re.compile(rb"\r?\n\r?\n")
# The text of a completion, the content of a chat delta, or its reasoning, when it is not empty.
# Quotes inside JSON strings are escaped, so generated text cannot imitate a key.
_TEXT = re.compile(rb'"(?:text|content|reasoning_content|reasoning)":\s*"(?!")')
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


def has_usage(data: bytes) -> bool:
    """Whether a streamed chunk carries token counts, without decoding it."""
    return _USAGE.search(data) is not None


def _data(event: bytes) -> bytes:
    if event.startswith(b"data:") and b"\n" not in event:
        return event[5:].strip()
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)
