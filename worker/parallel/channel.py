"""The sockets between a worker group's coordinator and its ranks: one Unix stream per rank.

A step of a small model takes a tenth of a millisecond, so a message may cost one wake-up and no
more: zmq's I/O threads made it three on either side. Frames are a length (uint32) and a msgpack
struct, never pickle; every Plan carries a sequence number besides. The directory that holds the
endpoint is private to the group's user.
"""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Collection, Sequence
from struct import Struct

import msgspec
import zmq

from worker.parallel.messages import FromRank, ToRank

LINGER_MS = 500
"""How long a closing socket may still flush, so that a rank's last word arrives."""
_CONNECT_RETRY_S = 0.02
_BUFFER_BYTES = 4 << 20
"""Asked of the system per direction, so that a long prompt hardly ever waits to be read."""
_HEADER = Struct("<I")
_READ_BYTES = 1 << 18


def endpoint(directory: str, name: str) -> str:
    """The ipc address of a zmq socket in the group's directory. Raises ValueError if too long."""
    return f"ipc://{socket_path(directory, name)}"


def socket_path(directory: str, name: str) -> str:
    """The path of a socket in the group's directory.

    Raises:
        ValueError: the path is longer than a Unix socket address can be.
    """
    path = f"{directory}/{name}"
    if len(path.encode()) > 107:
        raise ValueError(f"socket path {path!r} exceeds 107 bytes: choose a shorter directory")
    return path


def open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """A zmq socket without a high-water mark, so that no message is ever dropped or blocks."""
    opened = context.socket(kind)
    opened.setsockopt(zmq.SNDHWM, 0)
    opened.setsockopt(zmq.RCVHWM, 0)
    opened.setsockopt(zmq.LINGER, LINGER_MS)
    return opened


class FrameStream:
    """Frames over one connected stream socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._received = bytearray()
        self._unsent = bytearray()
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)

    def fileno(self) -> int:
        """For polling."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` has something to do once the socket is writable."""
        return bool(self._unsent)

    def send(self, payload: bytes) -> None:
        """Sends a frame without waiting: what the system does not take stays for `flush`."""
        if self._unsent:
            self._unsent += _HEADER.pack(len(payload)) + payload
            return
        data = _HEADER.pack(len(payload)) + payload
        try:
            sent = self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # the peer is gone: its end shows when reading
        self._unsent += memoryview(data)[sent:]

    def send_all(self, payload: bytes) -> None:
        """Sends a frame, waiting for the peer to read where it must. Raises OSError."""
        self._socket.sendall(_HEADER.pack(len(payload)) + payload)

    def flush(self) -> None:
        """Sends more of what is left, without waiting."""
        try:
            sent = self._socket.send(self._unsent, socket.MSG_DONTWAIT)
            del self._unsent[:sent]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()

    def flush_all(self, timeout_s: float) -> None:
        """Sends all that is left, for as long as `timeout_s` at most."""
        deadline = time.monotonic() + timeout_s
        while self._unsent and (left := deadline - time.monotonic()) > 0:
            select.select([], [self._socket], [], left)
            self.flush()

    def read(self) -> list[bytes]:
        """Waits for data and returns the frames that it completes.

        Raises:
            EOFError: the peer has closed its end.
        """
        try:
            data = self._socket.recv(_READ_BYTES)
        except ConnectionError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        received = self._received
        if not received and len(data) >= 4 and _HEADER.unpack_from(data)[0] == len(data) - 4:
            return [data[4:]]
        received += data
        frames, start = [], 0
        while len(received) - start >= 4:
            end = start + 4 + int(_HEADER.unpack_from(received, start)[0])
            if end > len(received):
                break
            frames.append(bytes(received[start + 4 : end]))
            start = end
        del received[:start]
        return frames

    def close(self) -> None:
        """Closes the socket. Safe to call twice."""
        self._socket.close()


class CoordinatorChannel:
    """The coordinator's end: ranks connect to it, and are all sent the same."""

    def __init__(self, directory: str, ranks: Sequence[int]) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromRank)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(socket_path(directory, "ranks"))
        self._listener.listen(len(ranks))
        self._streams: dict[int, FrameStream] = {}
        """Of ranks that are connected, by descriptor."""
        self._sent: list[bytes] = []
        """All that has been sent while ranks were still to come."""
        self._num_missing = len(ranks)
        self._messages: deque[FromRank] = deque()
        self.num_lost = 0
        """Ranks that have closed their end."""

    @property
    def fds(self) -> list[int]:
        """Descriptors that turn readable when a rank says something, or ends."""
        return list(self._streams)

    def send(self, message: ToRank) -> None:
        """Sends one message to every rank without waiting; encoded once."""
        payload = self._encoder.encode(message)
        for stream in self._streams.values():
            stream.send(payload)
        if self._num_missing:
            self._sent.append(payload)

    def next(self) -> FromRank | None:
        """The oldest message that has been read and not taken."""
        return self._messages.popleft() if self._messages else None

    def wait(self, others: Collection[int] = (), timeout_ms: int | None = None) -> None:
        """Waits until something was read or sent, a rank ended, or one of `others` is readable.

        A rank's end shows as the end of its stream, so `others` need not tell of it.
        """
        if not (others or self._num_missing) and timeout_ms is None and len(self._streams) == 1:
            ((fd, stream),) = self._streams.items()
            if not stream.has_unsent:
                return self._serve(fd, select.POLLIN)
        poller = select.poll()
        for fd, stream in self._streams.items():
            poller.register(fd, select.POLLIN | (select.POLLOUT if stream.has_unsent else 0))
        for fd in others:
            poller.register(fd, select.POLLIN)
        if self._num_missing:
            poller.register(self._listener, select.POLLIN)
        for fd, event in poller.poll(timeout_ms):
            if fd in self._streams:
                self._serve(fd, event)
            elif fd == self._listener.fileno():
                self._accept()

    def close(self) -> None:
        """Closes all sockets after a short flush."""
        for stream in self._streams.values():
            stream.flush_all(LINGER_MS / 1e3)
            stream.close()
        self._listener.close()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        stream = FrameStream(connection)
        self._streams[stream.fileno()] = stream
        self._num_missing -= 1
        for payload in self._sent:
            stream.send(payload)
        if not self._num_missing:
            self._sent.clear()

    def _serve(self, fd: int, event: int) -> None:
        stream = self._streams[fd]
        if event & select.POLLOUT:
            stream.flush()
        if event & ~select.POLLOUT:
            try:
                self._messages += map(self._decoder.decode, stream.read())
            except EOFError:
                del self._streams[fd]
                stream.close()
                self.num_lost += 1


class RankChannel:
    """A rank's end."""

    def __init__(self, directory: str) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToRank)
        self._stream = FrameStream(_connect(socket_path(directory, "ranks")))
        self._messages: deque[ToRank] = deque()

    def receive(self) -> ToRank:
        """The next message of the coordinator; waits for it.

        Raises:
            EOFError: the coordinator is gone.
        """
        while not self._messages:
            self._messages += map(self._decoder.decode, self._stream.read())
        return self._messages.popleft()

    def send(self, message: FromRank) -> None:
        """Sends one message to the coordinator, which always reads before long."""
        self._stream.send_all(self._encoder.encode(message))

    def close(self) -> None:
        """Closes the socket."""
        self._stream.close()


def _connect(path: str) -> socket.socket:
    """Connects as soon as somebody listens: whoever started this rank starts that one too."""
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
            return connection
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            time.sleep(_CONNECT_RETRY_S)
