"""Stream sockets between the processes of a worker group, which carry `worker.protocol.frames`.

A step of a small model takes a tenth of a millisecond, so a message may only cost a single thread
wake-up; zmq's I/O threads need three on either side. Within a node, these are Unix sockets in a
directory private to the group's user. Between nodes, they are TCP sockets
(`worker.plan.rendezvous`).
"""

from __future__ import annotations

import select
import socket
import time

from worker.protocol.frames import FrameReader, frame

_CONNECT_RETRY_S = 0.02
_BUFFER_BYTES = 4 << 20
"""Socket buffer size per direction in bytes, large enough for long prompts."""
_READ_BYTES = 1 << 18
_SILENCE_S = 5
"""Idle time in seconds after which TCP probes the peer's node, and time between probes."""
_LOST_AFTER_S = 20
"""Seconds without a response after which a node counts as lost."""


def socket_path(directory: str, name: str) -> str:
    """Path of a socket in the group's directory.

    Raises:
        ValueError: the path is too long for a Unix socket.
    """
    path = f"{directory}/{name}"
    if len(path.encode()) > 107:
        raise ValueError(
            f"socket path {path!r} exceeds the limit of 107 bytes: set TMPDIR to a shorter path"
        )
    return path


def listen(directory: str, name: str, backlog: int) -> socket.socket:
    """Creates a listening socket in the group's directory. Raises the same error
    as `socket_path`."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(socket_path(directory, name))
    listener.listen(backlog)
    return listener


def connect(directory: str, name: str) -> FrameStream:
    """Connects to a socket in the group's directory, waiting until a process listens there.

    There is no timeout, since the parent of this process also starts the process that listens.
    """
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(socket_path(directory, name))
            return FrameStream(connection)
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            time.sleep(_CONNECT_RETRY_S)


def listen_on(host: str, backlog: int) -> socket.socket:
    """Creates a TCP socket that listens on a free port of the given address."""
    listener = socket.socket(_family(host))
    listener.bind((host, 0))
    listener.listen(backlog)
    return listener


def connect_to(host: str, port: int) -> FrameStream:
    """Connects over TCP to a process that is already listening. Raises OSError if that fails."""
    connection = socket.socket(_family(host))
    try:
        connection.connect((host, port))
    except OSError:
        connection.close()
        raise
    return FrameStream(connection)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _keep_alive(connection: socket.socket) -> None:
    """Configures TCP to send each frame immediately, and to detect the loss of the peer's node."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, _SILENCE_S),
        (socket.TCP_KEEPINTVL, _SILENCE_S),
        (socket.TCP_KEEPCNT, _LOST_AFTER_S // _SILENCE_S),
        (socket.TCP_USER_TIMEOUT, _LOST_AFTER_S * 1000),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class FrameStream:
    """Sends and receives frames over one connected stream socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._reader = FrameReader()
        self.unsent = bytearray()
        """Bytes that `flush` will send once the socket is writable."""
        # HAZARD: a thread that waits in `recv` is woken needlessly whenever the peer reads what was
        # sent to it, and the peer's `recv` waits for that: 50 us on a virtual machine. A thread
        # that waits in `poll` for POLLIN is only woken when data arrives.
        self._arrivals = select.poll()
        self._arrivals.register(connection, select.POLLIN)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        if connection.family != socket.AF_UNIX:
            _keep_alive(connection)

    def fileno(self) -> int:
        """File descriptor of the socket, for polling; -1 once it is closed."""
        return self._socket.fileno()

    def send(self, payload: bytes) -> None:
        """Sends a frame without blocking. Bytes that the kernel does not accept are left to
        `flush`."""
        data = frame(payload)
        if self.unsent:
            self.unsent += data
            return
        try:
            sent = self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # the peer has exited, which `read` reports
        self.unsent += memoryview(data)[sent:]

    def send_all(self, payload: bytes) -> None:
        """Sends a frame, waiting until the kernel has accepted all of it. Raises OSError if the
        connection is broken."""
        self._socket.sendall(frame(payload))

    def flush(self) -> None:
        """Sends as many unsent bytes as the kernel accepts, without blocking."""
        try:
            sent = self._socket.send(self.unsent, socket.MSG_DONTWAIT)
            del self.unsent[:sent]
        except BlockingIOError:
            return
        except OSError:
            self.unsent.clear()

    def flush_all(self, timeout_s: float) -> None:
        """Sends all unsent data, waiting for at most `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while self.unsent and (left := deadline - time.monotonic()) > 0:
            select.select([], [self._socket], [], left)
            self.flush()

    def read(self, *, wait: bool = True) -> list[bytes]:
        """Returns the frames completed by newly arrived data; with `wait`, waits for data.

        Raises:
            EOFError: the peer has closed the connection, or sent invalid frames.
        """
        if wait:
            self._arrivals.poll()
        try:
            data = self._socket.recv(_READ_BYTES, 0 if wait else socket.MSG_DONTWAIT)
            if not data:
                raise EOFError
            return self._reader.feed(data)
        except BlockingIOError:
            return []
        except ConnectionError as error:
            raise EOFError from error

    def close(self) -> None:
        """Closes the socket. Idempotent."""
        self._socket.close()
