"""Frames on the stream socket between a gateway and a worker's front on the same node.

length (uint32) · kind (uint8) · call (uint32), little-endian; then the payload: msgpack

gateway ──ATTACH (Attach), CALL (SubmitBatch)────────────────> front
gateway <──ITEM (WorkerItem), REPLY (SubmitReply), FAILURE (text)── front
"""

from __future__ import annotations

from struct import Struct

import msgspec

ATTACH, ITEM, CALL, REPLY, FAILURE = range(5)

MAX_PAYLOAD_BYTES = 256 * 2**20
"""A longer frame is no frame of ours: the stream is broken."""

_HEADER = Struct("<IBI")


class Attach(msgspec.Struct):
    """First frame of a connection: whose it is."""

    gateway_id: str


class SocketOffer(msgspec.Struct):
    """First item of an attach call over Serve: where the worker's items are to be read.

    The call itself carries the items if there is no path. Else it stays open without a further
    item: Serve ends a draining worker once no call to it is left.
    """

    path: str | None


def pulse_key(worker_id: str) -> bytes:
    """Where a worker whose event loop is late gives signs of life, in Ray's key-value store."""
    return f"pulse/{worker_id}".encode()


def frame(kind: int, call: int, payload: bytes) -> bytes:
    """One frame. `call` joins a reply to its call, 0 where there is none."""
    return _HEADER.pack(len(payload), kind, call) + payload


class FrameReader:
    """Cuts what a socket delivers into frames."""

    __slots__ = ("_missing", "_rest")

    def __init__(self) -> None:
        self._rest = bytearray()
        """The beginning of a frame."""
        self._missing = 0
        """How many bytes its next step needs: a long frame is looked at once, not per piece."""

    def feed(self, data: bytes) -> list[tuple[int, int, bytes]]:
        """Kind, call and payload of every frame that `data` completes.

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
        frames = []
        start, end, needed = 0, len(data), 0
        while end - start >= _HEADER.size:
            length, kind, call = _HEADER.unpack_from(data, start)
            if length > MAX_PAYLOAD_BYTES or kind > FAILURE:
                raise ConnectionError(f"a frame of kind {kind} with {length} bytes")
            needed = _HEADER.size + length
            if end - start < needed:
                break
            frames.append((kind, call, data[start + _HEADER.size : start + needed]))
            start, needed = start + needed, 0
        if start < end:
            self._rest += data[start:]
            self._missing = max(needed, _HEADER.size) - len(self._rest)
        return frames
