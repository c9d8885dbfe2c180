"""JSON of any length, encoded in slices that are each a few milliseconds of work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec

SLICE_ROWS = 64
"""Rows that are encoded at a time: tokens, each with up to 21 log-probabilities and their texts,
which takes 3 ms."""
SLICE_BYTES = 1 << 18
"""A reply goes out whenever there are so many of it, whatever follows."""

encode = msgspec.json.Encoder().encode


class Rows:
    """A JSON array whose items are made only as they are encoded, once.

    Args:
        items: in order.
    """

    __slots__ = ("items",)

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = items


class Encoded:
    """A value that is JSON already.

    Args:
        parts: of it.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: Iterable[bytes]) -> None:
        self.parts = parts


def slices(value: Any) -> Iterator[bytes]:
    """JSON of `value`, in slices: objects may hold Rows, Encoded, and objects with such."""
    if isinstance(value, dict):
        before = b"{"
        for key, item in value.items():
            yield before + encode(key) + b":"
            yield from slices(item)
            before = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, Rows):
        yield from _rows(iter(value.items))
    elif isinstance(value, Encoded):
        yield from value.parts
    else:
        yield encode(value)


def _rows(items: Iterator[Any]) -> Iterator[bytes]:
    before = b"["
    for first in items:
        yield before + encode([first, *islice(items, SLICE_ROWS - 1)])[1:-1]
        before = b","
    yield b"]" if before == b"," else b"[]"
