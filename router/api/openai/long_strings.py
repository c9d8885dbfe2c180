"""Decodes JSON with long strings piece by piece, since decoding holds the GIL."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import numpy as np

from router.api.http.body import Payload
from router.api.openai.values import CHUNK_BYTES, delimiting_quotes

CUT_BYTES: Final = 1 << 22
"""Minimum size in bytes of a JSON text whose long strings are cut out before decoding. Decoding
holds the GIL, which stalls all streams of the gateway for 2 to 8 ms per MiB: up to 270 ms for the
largest body."""
LONG_BYTES: Final = 1 << 19
"""Minimum size in bytes of a string that is cut out and decoded in pieces."""
_PIECE_BYTES: Final = 12 << 15
"""Bytes of a string decoded at a time: a multiple of 1, 2, 3, 4, 6 and 12, the lengths that a
character may have, so that cutting a run of equal characters rarely splits one."""
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB]")


class CutJson:
    """A JSON text whose long strings are cut out.

    Args:
        body: the text, valid or not.
    """

    __slots__ = ("_body", "_marks", "skeleton")

    def __init__(self, body: Payload) -> None:
        self._body = body
        self._marks: dict[str, tuple[int, int]] = {}
        """Positions of the long strings in the text, without quotes, by the string that replaces
        them."""
        self.skeleton: Payload = body
        """The text with a short string in place of each long one."""
        if len(body) > CUT_BYTES:
            self._cut()

    def num_bytes(self, part: memoryview) -> int:
        """Size in bytes that a part of the skeleton has in the original text."""
        octets = bytes(part) if self._marks else b""
        cut = (end - begin for mark, (begin, end) in self._marks.items() if mark.encode() in octets)
        return len(part) + sum(cut)

    def decode(self) -> Any:
        """The decoded text.

        Raises:
            msgspec.DecodeError: the text is not valid JSON.
            UnicodeDecodeError: the text is not valid UTF-8.
            RecursionError: the text is nested too deeply.
        """
        value = msgspec.json.decode(self.skeleton)
        if not self._marks:
            return value
        strings = {
            mark: _string(self._body, begin, end) for mark, (begin, end) in self._marks.items()
        }
        return _restored(value, strings)

    def _cut(self) -> None:
        # Random, so that no text refers to its own long strings: many references to one string
        # would be a body of terabytes.
        secret = secrets.token_hex(16)
        parts: list[bytes | bytearray] = []
        last = 0
        for number, (begin, end) in enumerate(_long_strings(self._body)):
            mark = f"{secret}{number}"
            self._marks[mark] = (begin, end)
            parts += self._body[last:begin], mark.encode()
            last = end
        if parts:
            self.skeleton = b"".join([*parts, self._body[last:]])


def _long_strings(body: Payload) -> Iterator[tuple[int, int]]:
    """Positions of the strings with more than LONG_BYTES bytes, without quotes, in order.

    numpy releases the GIL while searching.
    """
    opening = np.empty(0, np.int64)  # place of the quote before the chunk that is still open
    is_escaped = False
    for start in range(0, len(body), CHUNK_BYTES):
        data = np.frombuffer(body, np.uint8, min(CHUNK_BYTES, len(body) - start), start)
        quotes, is_escaped = delimiting_quotes(data, is_escaped)
        places = np.concatenate([opening, np.flatnonzero(quotes) + start])
        num_pairs = len(places) // 2
        begins, ends = places[: 2 * num_pairs : 2], places[1 : 2 * num_pairs : 2]
        for pair in np.flatnonzero(ends - begins > LONG_BYTES + 1).tolist():
            yield begins.item(pair) + 1, ends.item(pair)
        opening = places[2 * num_pairs :]


def _string(body: Payload, begin: int, end: int) -> str:
    """Decodes the inside of a string. Raises msgspec.DecodeError or UnicodeDecodeError."""
    pieces: list[str] = []
    while begin < end:
        cut = end if end - begin <= _PIECE_BYTES else _boundary(body, begin, begin + _PIECE_BYTES)
        piece = b"".join([b'"', memoryview(body)[begin:cut], b'"'])
        pieces.append(msgspec.json.decode(piece))
        begin = cut
    return "".join(pieces)


def _boundary(body: Payload, begin: int, cut: int) -> int:
    """The last position up to `cut` that is not within a character.

    Args:
        body: JSON.
        begin: start of a character of the string, at least 15 bytes before `cut`.
        cut: a position in the same string.
    """
    for _ in range(3):  # UTF-8 has up to three further bytes
        if body[cut] & 0xC0 == 0x80:
            cut -= 1
    for _ in range(2):  # an unfinished escape, and the first half of a pair before it
        at = body.rfind(b"\\", cut - 6, cut)
        if at < 0:
            break
        before = body[begin : at + 1]
        if (len(before) - len(before.rstrip(b"\\"))) % 2 == 0:
            break  # the backslash is escaped by another one
        after = at + (6 if body[at + 1 : at + 2] == b"u" else 2)
        is_half = after == cut and _HIGH_SURROGATE.match(body, at)
        if after > cut or is_half:
            cut = at
    return cut


def _restored(value: Any, strings: dict[str, str]) -> Any:
    """Puts the long strings back into `value`, whose objects and lists are changed in place."""
    if isinstance(value, str):
        return strings.get(value, value)
    if isinstance(value, list):
        value[:] = [_restored(item, strings) for item in value]
    elif isinstance(value, dict):
        items = [(_restored(key, strings), _restored(item, strings)) for key, item in value.items()]
        value.clear()
        value.update(items)
    return value
