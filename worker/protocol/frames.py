"""Frames on stream sockets, and the messages between a gateway and a frontend on the same node.

A frame is a length (uint32, little-endian) followed by a payload of that many bytes: one message in
msgpack, never pickled. All processes of a worker group and its gateways use this format.

gateway ──Attach, then Call (SubmitBatch)──────────────────────────> frontend
gateway <──Item (WorkerItem), Reply (SubmitReply), CallFailure (text)── frontend
"""

from __future__ import annotations

from struct import Struct

import msgspec

MAX_PAYLOAD_BYTES = 256 * 2**20
"""Maximum payload length in bytes. A larger value means that the stream is corrupt."""

_HEADER = Struct("<I")


class Attach(msgspec.Struct, tag="attach", array_like=True, frozen=True):
    """First frame of a gateway's connection, which identifies the gateway."""

    gateway_id: str


class Call(msgspec.Struct, tag="call", array_like=True, frozen=True):
    """Call of `submit` by a gateway."""

    number: int
    """Number of the call, repeated in the reply."""
    payload: bytes
    """SubmitBatch encoded as msgpack."""


class Item(msgspec.Struct, tag="item", array_like=True, frozen=True):
    """The next item of the attach stream."""

    payload: bytes
    """WorkerItem encoded as msgpack."""


class Reply(msgspec.Struct, tag="reply", array_like=True, frozen=True):
    """Reply to a call."""

    number: int
    payload: bytes
    """SubmitReply encoded as msgpack."""


class CallFailure(msgspec.Struct, tag="failure", array_like=True, frozen=True):
    """Reply to a call that failed in the frontend."""

    number: int
    error: str


FromGateway = Attach | Call
ToGateway = Item | Reply | CallFailure


class SocketOffer(msgspec.Struct):
    """First item of an attach call over Serve: the socket that carries the worker's items."""

    path: str | None
    """Path of the socket, for a gateway on the worker's node; None if the call itself carries the
    items. With a socket, the call stays open without further items, since Serve stops a draining
    worker once it has no open calls."""


def heartbeat_key(worker_id: str) -> bytes:
    """Key in Ray's key-value store for the heartbeats of a worker whose event loop is blocked."""
    return f"pulse/{worker_id}".encode()


def frame(payload: bytes) -> bytes:
    """Encodes a payload as a frame: its length, then the payload."""
    return _HEADER.pack(len(payload)) + payload


class FrameReader:
    """Splits data from a socket into frames."""

    __slots__ = ("_missing", "_rest")

    def __init__(self) -> None:
        self._rest = bytearray()
        """Start of an incomplete frame."""
        self._missing = 0
        """Number of bytes missing from the current frame or header; nothing is parsed until they
        have arrived."""

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the payloads of all frames that `data` completes.

        Raises:
            ConnectionError: a frame is too long, so the stream is corrupt.
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
                raise ConnectionError(f"corrupt stream: frame of {length} bytes")
            needed = _HEADER.size + length
            if end - start < needed:
                break
            payloads.append(data[start + _HEADER.size : start + needed])
            start, needed = start + needed, 0
        if start < end:
            self._rest += data[start:]
            self._missing = max(needed, _HEADER.size) - len(self._rest)
        return payloads
