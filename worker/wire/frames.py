"""Frames on stream sockets, and what a gateway and a worker's frontend say in them on one node.

A frame is a length (uint32, little-endian) and a payload of as many bytes: msgpack of one message,
never pickle. All processes of a worker group and its gateways cut their streams with this code.

gateway ──Attach, then Call (SubmitBatch)──────────────────────────────> front
gateway <──Item (WorkerItem), Reply (SubmitReply), CallFailure (text)── front
"""

from __future__ import annotations

from struct import Struct

import msgspec

MAX_PAYLOAD_BYTES = 256 * 2**20
"""A longer frame is no frame of ours: the stream is broken."""

_HEADER = Struct("<I")


class Attach(msgspec.Struct, tag="attach", array_like=True, frozen=True):
    """First frame of a gateway's connection: whose it is."""

    gateway_id: str


class Call(msgspec.Struct, tag="call", array_like=True, frozen=True):
    """A gateway submits."""

    number: int
    """Joins the answer to it."""
    payload: bytes
    """Msgpack of a SubmitBatch."""


class Item(msgspec.Struct, tag="item", array_like=True, frozen=True):
    """The next item of the attach stream."""

    payload: bytes
    """Msgpack of a WorkerItem."""


class Reply(msgspec.Struct, tag="reply", array_like=True, frozen=True):
    """The answer to a call."""

    number: int
    payload: bytes
    """Msgpack of a SubmitReply."""


class CallFailure(msgspec.Struct, tag="failure", array_like=True, frozen=True):
    """The frontend could not take a call."""

    number: int
    error: str


FromGateway = Attach | Call
ToGateway = Item | Reply | CallFailure


class SocketOffer(msgspec.Struct):
    """First item of an attach call over Serve: where the worker's items are to be read.

    The call itself carries the items if there is no path. Else it stays open without a further
    item: Serve ends a draining worker once no call to it is left.
    """

    path: str | None


def pulse_key(worker_id: str) -> bytes:
    """Where a worker whose event loop is late gives signs of life, in Ray's key-value store."""
    return f"pulse/{worker_id}".encode()


def frame(payload: bytes) -> bytes:
    """One frame."""
    return _HEADER.pack(len(payload)) + payload


class FrameReader:
    """Cuts what a socket delivers into frames."""

    __slots__ = ("_missing", "_rest")

    def __init__(self) -> None:
        self._rest = bytearray()
        """The beginning of a frame."""
        self._missing = 0
        """How many bytes its next step needs: a long frame is looked at once, not per piece."""

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads of all frames that `data` completes.

        Raises:
            ConnectionError: this is not a stream of frames.
        """
        if self._rest:
            self._rest += data
            self._missing -= len(data)
            if self._missing > 0:
                return []
            data = bytes(self._rest)
            self._rest.clear()
        payloads = []
        start, end, needed = 0, len(data), 0
        while end - start >= _HEADER.size:
            (length,) = _HEADER.unpack_from(data, start)
            if length > MAX_PAYLOAD_BYTES:
                raise ConnectionError(f"a frame of {length} bytes")
            needed = _HEADER.size + length
            if end - start < needed:
                break
            payloads.append(data[start + _HEADER.size : start + needed])
            start, needed = start + needed, 0
        if start < end:
            self._rest += data[start:]
            self._missing = max(needed, _HEADER.size) - len(self._rest)
        return payloads
