"""Messages on a Unix stream socket: four bytes of length, then the payload."""

from __future__ import annotations

import socket

_HEADER_BYTES = 4
_CHUNK_BYTES = 1 << 18


def frame(payload: bytes) -> bytes:
    """A payload as it goes onto the stream; in one piece, so that sending is one system call."""
    return len(payload).to_bytes(_HEADER_BYTES, "little") + payload


class FrameReader:
    """Cuts what arrives on a connection into payloads."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def next(self) -> bytes | None:
        """The oldest payload that is here in full."""
        size = int.from_bytes(self._buffer[:_HEADER_BYTES], "little")
        end = _HEADER_BYTES + size
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[_HEADER_BYTES:end])
        del self._buffer[:end]
        return payload

    def feed(self, data: bytes) -> None:
        """Takes what arrived."""
        self._buffer += data

    def fill(self, connection: socket.socket, flags: int = 0) -> bool:
        """Takes what the connection has; False at its end.

        Waits as the connection and `flags` say. Raises BlockingIOError where that is not at all.
        """
        try:
            received = connection.recv(_CHUNK_BYTES, flags)
        except ConnectionError:
            return False
        self.feed(received)
        return bool(received)
