"""The connections between a worker group's coordinator and its ranks: Unix stream sockets.

A message costs one system call on either side and no other thread: a socket library's I/O threads
took five times as long for a round trip, on cores that the step needs. Nothing is dropped or
reordered, and every Plan carries a sequence number besides. Payloads are msgspec structs, never
pickle. The directory that holds the sockets is private to the group's user.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq

from worker.parallel.frames import FrameReader, frame
from worker.parallel.messages import FromRank, ToRank

LINGER_MS = 500
"""How long a closing socket may still flush, so that the last words arrive."""
_RETRY_S = 0.02
"""Between a rank's attempts to reach a coordinator that is not there yet."""


def endpoint(directory: str, name: str) -> str:
    """The ipc address of a socket in the group's directory. Raises as `socket_path` does."""
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
    """A socket to the front, without a high-water mark: no message is dropped or blocks a step."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    return socket


class CoordinatorChannel:
    """The coordinator's end: ranks connect to it, and each says hello first.

    Args:
        directory: the group's private folder.
        num_ranks: how many will connect.
    """

    def __init__(self, directory: str, num_ranks: int) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromRank)
        self._messages: deque[FromRank] = deque()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(socket_path(directory, "ranks"))
        self._listener.listen(max(1, num_ranks))
        self._connections: dict[int, tuple[socket.socket, FrameReader]] = {}
        """By descriptor, in the order of connecting."""

    def send(self, message: ToRank) -> None:
        """Sends one message to every rank that has said hello; encoded once.

        Waits only where a rank's socket is full, and reads meanwhile what ranks say: a rank that
        waits to be heard would not read either.
        """
        data = frame(self._encoder.encode(message))
        for fd, (connection, _) in list(self._connections.items()):
            rest = memoryview(data)
            while len(rest) and fd in self._connections:
                try:
                    rest = rest[connection.send(rest) :]
                except BlockingIOError:
                    self._wait((), None, writable=fd)
                except ConnectionError:
                    break  # the rank has ended: whoever watches its process says so

    def send_last(self, message: ToRank) -> None:
        """Sends without waiting, on the way out: a rank that hangs with a full socket misses it."""
        data = frame(self._encoder.encode(message))
        for connection, _ in self._connections.values():
            with contextlib.suppress(OSError):
                connection.send(data)

    def receive(
        self, other_fds: Sequence[int] = (), timeout_ms: int | None = None
    ) -> FromRank | None:
        """The next message of any rank; blocks.

        None where no message is there and one of `other_fds` is readable, or time has run out.
        """
        while not self._messages:
            if not self._wait(other_fds, timeout_ms):
                break
        return self._messages.popleft() if self._messages else None

    def close(self) -> None:
        """Closes all connections; what was sent can still be read."""
        for connection, _ in self._connections.values():
            connection.close()
        self._connections.clear()
        self._listener.close()

    def _wait(
        self, other_fds: Sequence[int], timeout_ms: int | None, writable: int | None = None
    ) -> bool:
        """Waits for anything and takes what ranks sent; False unless a rank did something."""
        poller = select.poll()
        for fd in (self._listener.fileno(), *self._connections, *other_fds):
            poller.register(fd, select.POLLIN)
        if writable is not None:
            poller.register(writable, select.POLLIN | select.POLLOUT)
        heard = False
        for fd, events in poller.poll(timeout_ms):
            if fd == self._listener.fileno():
                self._accept()
                heard = True
            elif fd in self._connections and events != select.POLLOUT:
                self._read(fd)
                heard = True
        return heard

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.setblocking(False)
        self._connections[connection.fileno()] = (connection, FrameReader(connection))

    def _read(self, fd: int) -> None:
        connection, reader = self._connections[fd]
        is_open = reader.fill()
        while (payload := reader.next()) is not None:
            self._messages.append(self._decoder.decode(payload))
        if not is_open:
            del self._connections[fd]
            connection.close()


class RankChannel:
    """A rank's end. Waits for the coordinator to be there."""

    def __init__(self, directory: str) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToRank)
        self._connection = _connect(socket_path(directory, "ranks"))
        self._reader = FrameReader(self._connection)

    def receive(self) -> ToRank:
        """The next message of the coordinator; blocks.

        Raises:
            ConnectionError: the coordinator has ended.
        """
        while (payload := self._reader.next()) is None:
            if not self._reader.fill():
                raise ConnectionError("the coordinator of this worker group has ended")
        message: ToRank = self._decoder.decode(payload)
        return message

    def send(self, message: FromRank) -> None:
        """Sends one message to the coordinator. Raises ConnectionError if it has ended."""
        self._connection.sendall(frame(self._encoder.encode(message)))

    def close(self) -> None:
        """Closes the connection; what was sent can still be read."""
        self._connection.close()


def _connect(path: str) -> socket.socket:
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(path)
            return connection
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            time.sleep(_RETRY_S)
