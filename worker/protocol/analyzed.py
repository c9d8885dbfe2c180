"""Thread-safe decoding with msgspec."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

_Kind = TypeVar("_Kind")
_analyzed = set[Any]()
_lock = threading.Lock()


def analyzed(kind: type[_Kind]) -> type[_Kind]:
    """Makes msgspec analyze `kind`, unless it already has, and returns it, for calls such as
    `msgspec.convert(value, analyzed(Kind))`.

    HAZARD: msgspec 0.22 analyzes a class when it first decodes to it, and other threads use the
    analysis before it is complete. They then read a null pointer, and the process crashes with
    SIGSEGV.
    """
    if kind not in _analyzed:
        with _lock:
            msgspec.json.Decoder(kind)
            _analyzed.add(kind)
    return kind
