"""JSON of any length, encoded in slices that are each a few milliseconds of work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import msgspec

SLICE_ROWS = 64
"""Rows that are encoded at a time: tokens, each with up to 21 log-probabilities and their texts,
which takes 3 ms."""
SLICE_BYTES = 1 << 18
"""A reply goes out whenever there are so many of it, whatever follows."""

encode = msgspec.json.Encoder().encode


class Kept:
    """Items of JSON arrays that begin alike, made and encoded for the first of them alone.

    Arrays are written one after another.

    Args:
        items: in order.
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
    """A JSON array whose items are made only as they are encoded, once.

    Args:
        items: in order.
        first: what comes before them.
    """

    __slots__ = ("first", "items")

    def __init__(self, items: Iterable[Any], first: Kept | None = None) -> None:
        self.items = items
        self.first = first


def slices(value: Any) -> Iterator[bytes]:
    """JSON of `value`, in slices: objects may hold Rows, and objects with such."""
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
    """Items of an array, a slice of them at a time, without the brackets."""
    for first in items:
        yield encode([first, *islice(items, SLICE_ROWS - 1)])[1:-1]
