"""Scanner of server-sent events for the load client; inspects chunks without decoding JSON."""

from __future__ import annotations

import re

_BREAK = re.compile(rb"\r?\n\r?\n")
# Non-empty text of a completion, or content or reasoning of a chat delta. Quotes inside JSON
# strings are escaped, so generated text cannot look like a key.
_TEXT = re.compile(rb'"(?:text|content|reasoning_content|reasoning)":\s*"(?!")')
_CHOICES = re.compile(rb'"choices":\s*\[\s*\{')
_ROLE = re.compile(rb'"role":\s*"')
_USAGE = re.compile(rb'"usage":\s*\{')


class EventScanner:
    """Splits a byte stream into the data of its events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Data of the events completed by `chunk`, without comments and other fields."""
        *events, self._rest = _BREAK.split(self._rest + chunk)
        return [data for event in events if (data := _data(event))]


def has_text(data: bytes) -> bool:
    """Whether a streamed chunk has text."""
    return _TEXT.search(data) is not None


def has_choices(data: bytes) -> bool:
    """Whether a streamed chunk has choices, unlike the chunk with only usage."""
    return _CHOICES.search(data) is not None


def opens_chat(data: bytes) -> bool:
    """Whether a streamed chunk has a role and no text, like the first one of a chat."""
    return _ROLE.search(data) is not None and not has_text(data)


def has_usage(data: bytes) -> bool:
    """Whether a streamed chunk has usage (token counts)."""
    return _USAGE.search(data) is not None


def _data(event: bytes) -> bytes:
    if event.startswith(b"data:") and b"\n" not in event:
        return event[5:].strip()
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)
