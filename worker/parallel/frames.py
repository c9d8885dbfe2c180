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

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray()

    def next(self) -> bytes | None:
        """The oldest payload that is here in full, without touching the connection."""
        size = int.from_bytes(self._buffer[:_HEADER_BYTES], "little")
        end = _HEADER_BYTES + size
        if len(self._buffer) < max(end, _HEADER_BYTES + 1):
            return None
        payload = bytes(self._buffer[_HEADER_BYTES:end])
        del self._buffer[:end]
        return payload

    def fill(self) -> bool:
        """Takes what the connection has, waiting if it is a blocking one; False at its end."""
        try:
            received = self._connection.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        self._buffer += received
        return bool(received)
