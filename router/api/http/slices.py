"""Encodes long JSON in slices, so that each blocks the event loop for only a few milliseconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import msgspec

SLICE_ROWS = 64
"""Number of items of Rows encoded at a time: 3 ms for tokens with 21 log-probabilities each."""
SLICE_BYTES = 1 << 18
"""Minimum number of encoded bytes at which a part of a response is sent, before the rest is
encoded."""

encode = msgspec.json.Encoder().encode


class SharedItems:
    """Leading items shared by several JSON arrays, created and encoded only once.

    The first array must be written completely before the next starts.

    Args:
        items: the items, in order.
    """

    __slots__ = ("_items", "_parts")

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = iter(items)
        self._parts: list[bytes] = []

    def __iter__(self) -> Iterator[bytes]:
        yield from self._parts
        for part in _parts_of(self._items):
            self._parts.append(part)
            yield part


class Rows:
    """A JSON array whose items are created while they are encoded; it can be encoded only once.

    Args:
        items: the items, in order.
        first: already encoded items that precede `items`.
    """

    __slots__ = ("first", "items")

    def __init__(self, items: Iterable[Any], first: SharedItems | None = None) -> None:
        self.items = items
        self.first = first


def slices(value: Any) -> Iterator[bytes]:
    """JSON of `value` in slices; members of objects may be Rows, or objects with such members."""
    if isinstance(value, dict):
        before = b"{"
        for key, item in value.items():
            yield before + encode(key) + b":"
            yield from slices(item)
            before = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, Rows):
        yield from _array(chain(value.first or (), _parts_of(iter(value.items))))
    else:
        yield encode(value)


def _array(parts: Iterable[bytes]) -> Iterator[bytes]:
    before = b"["
    for part in parts:
        yield before + part
        before = b","
    yield b"]" if before == b"," else b"[]"


def _parts_of(items: Iterator[Any]) -> Iterator[bytes]:
    """JSON of an array's items without brackets, SLICE_ROWS items at a time."""
    for first in items:
        yield encode([first, *islice(items, SLICE_ROWS - 1)])[1:-1]
