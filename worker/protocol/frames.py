"""Frames on stream sockets, and the messages in them between a gateway and a frontend of its node.

A frame is a length (uint32, little-endian) and a payload of as many bytes: msgpack of one message,
never pickle. All processes of a worker group and its gateways cut their streams with this code.

gateway ──Attach, then Call (SubmitBatch)──────────────────────────────> front
gateway <──Item (WorkerItem), Reply (SubmitReply), CallFailure (text)── front
"""

from __future__ import annotations

from struct import Struct

import msgspec

MAX_PAYLOAD_BYTES = 256 * 2**20
"""Longest payload; a longer one shows that the stream is broken."""

_HEADER = Struct("<I")


class Attach(msgspec.Struct, tag="attach", array_like=True, frozen=True):
    """First frame of a gateway's connection: names the gateway."""

    gateway_id: str


class Call(msgspec.Struct, tag="call", array_like=True, frozen=True):
    """A gateway's call of `submit`."""

    number: int
    """Number of the call, which its answer has as well."""
    payload: bytes
    """Msgpack of a SubmitBatch."""


class Item(msgspec.Struct, tag="item", array_like=True, frozen=True):
    """The next item of the attach stream."""

    payload: bytes
    """Msgpack of a WorkerItem."""


class Reply(msgspec.Struct, tag="reply", array_like=True, frozen=True):
    """Answer to a call."""

    number: int
    payload: bytes
    """Msgpack of a SubmitReply."""


class CallFailure(msgspec.Struct, tag="failure", array_like=True, frozen=True):
    """Answer to a call that the frontend could not take."""

    number: int
    error: str


FromGateway = Attach | Call
ToGateway = Item | Reply | CallFailure


class SocketOffer(msgspec.Struct):
    """First item of an attach call over Serve: the socket that has the worker's items."""

    path: str | None
    """Path of the socket, for a gateway on the worker's node. The call then stays open without a
    further item, since Serve ends a draining worker once no call to it is open. None where the call
    itself carries the items."""


def pulse_key(worker_id: str) -> bytes:
    """Key, in Ray's key-value store, of the signs of life of a worker whose event loop is late."""
    return f"pulse/{worker_id}".encode()


def frame(payload: bytes) -> bytes:
    """The frame of a payload: its length and itself."""
    return _HEADER.pack(len(payload)) + payload


class FrameReader:
    """Cuts what a socket delivers into frames."""

    __slots__ = ("_missing", "_rest")

    def __init__(self) -> None:
        self._rest = bytearray()
        """Beginning of a frame that is not complete."""
        self._missing = 0
        """Bytes that the frame, or its header, lacks: pieces of a long frame are not looked at."""

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
