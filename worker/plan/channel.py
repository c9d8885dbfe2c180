"""Channels between a worker group's coordinator and its ranks: one stream socket per rank.

No message is ever dropped. Every Plan also has a sequence number.
"""

from __future__ import annotations

import hmac
import select
from collections import deque
from collections.abc import Collection, Sequence

import msgspec

from worker.plan.messages import FromRank, ToRank
from worker.plan.rendezvous import Rendezvous, RendezvousHost
from worker.plan.sockets import FrameStream, connect, connect_to, listen

LINGER_MS = 500
"""Maximum time for a closing socket to flush, in milliseconds."""


class CoordinatorChannel:
    """The coordinator's end of the channels. Ranks connect to it, and each message is sent to every
    rank.

    Args:
        directory: the group's private folder, where ranks on the same node connect.
        ranks: ranks expected to connect.
        host: listener for ranks on several nodes; None on a single node.
    """

    def __init__(
        self, directory: str, ranks: Sequence[int], host: RendezvousHost | None = None
    ) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromRank)
        self._listener = host.listener if host else listen(directory, "ranks", len(ranks))
        self._token = host.rendezvous.token.encode() if host else b""
        self._unauthenticated: dict[int, FrameStream] = {}
        """Connections that have not sent their token yet, by file descriptor."""
        self._streams: dict[int, FrameStream] = {}
        """Streams of connected ranks, by file descriptor."""
        self._sent: list[bytes] = []
        """Messages sent before all ranks were connected. Each rank receives them when it
        connects.
        """
        self._num_missing = len(ranks)
        self.messages: deque[FromRank] = deque()
        """Messages that have been read but not taken yet, oldest first."""
        self.num_lost = 0
        """Number of ranks that have closed the connection."""

    @property
    def fds(self) -> list[int]:
        """File descriptors that become readable when a rank sends a message or exits."""
        return list(self._streams)

    def send(self, message: ToRank) -> None:
        """Sends a message, encoded once, to every rank without blocking."""
        payload = self._encoder.encode(message)
        for stream in self._streams.values():
            stream.send(payload)
        if self._num_missing:
            self._sent.append(payload)

    def wait(self, others: Collection[int] = (), timeout_ms: int | None = None) -> None:
        """Waits until something has been read or sent, a rank has exited, one of `others` is
        readable, or `timeout_ms` milliseconds have passed (None: no limit).

        A rank's exit is detected as the end of its stream, so `others` need not report it.
        """
        if not (others or self._num_missing) and timeout_ms is None and len(self._streams) == 1:
            ((fd, stream),) = self._streams.items()
            if not stream.unsent:
                return self._serve(fd, select.POLLIN)
        poller = select.poll()
        for fd, stream in self._streams.items():
            poller.register(fd, select.POLLIN | (select.POLLOUT if stream.unsent else 0))
        for fd in others:
            poller.register(fd, select.POLLIN)
        for fd in self._unauthenticated:
            poller.register(fd, select.POLLIN)
        if self._num_missing:
            poller.register(self._listener, select.POLLIN)
        for fd, event in poller.poll(timeout_ms):
            if fd in self._streams:
                self._serve(fd, event)
            elif fd in self._unauthenticated:
                self._authenticate(fd)
            elif fd == self._listener.fileno():
                self._accept()

    def close(self) -> None:
        """Closes all sockets, waiting up to LINGER_MS for them to flush."""
        for stream in self._streams.values():
            stream.flush_all(LINGER_MS / 1e3)
            stream.close()
        for stream in self._unauthenticated.values():
            stream.close()
        self._listener.close()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        stream = FrameStream(connection)
        if self._token:
            self._unauthenticated[stream.fileno()] = stream
        else:
            self._admit(stream)

    def _authenticate(self, fd: int) -> None:
        """Accepts a connection whose first frame is the token, and closes any other."""
        stream = self._unauthenticated.pop(fd)
        try:
            frames = stream.read(wait=False)
        except EOFError:
            frames = []
        # The token fits into one segment, so a fragmented frame is not valid.
        if frames and hmac.compare_digest(frames[0], self._token):
            self._admit(stream)
            self.messages += map(self._decoder.decode, frames[1:])
        else:
            stream.close()

    def _admit(self, stream: FrameStream) -> None:
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
                self.messages += map(self._decoder.decode, stream.read())
            except EOFError:
                del self._streams[fd]
                stream.close()
                self.num_lost += 1


class RankChannel:
    """A rank's connection to the coordinator (CoordinatorChannel).

    Args:
        directory: the group's private folder, where the coordinator listens on a single node.
        rendezvous: address for ranks on several nodes; None on a single node.

    Raises:
        OSError: the rendezvous is unreachable.
    """

    def __init__(self, directory: str, rendezvous: Rendezvous | None = None) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToRank)
        if rendezvous is None:
            self._stream = connect(directory, "ranks")
        else:
            self._stream = connect_to(rendezvous.host, rendezvous.port)
            self._stream.send_all(rendezvous.token.encode())
        self._messages: deque[ToRank] = deque()

    def receive(self) -> ToRank:
        """Waits for the next message from the coordinator.

        Raises:
            EOFError: the coordinator has exited.
        """
        while not self._messages:
            self._messages += map(self._decoder.decode, self._stream.read())
        return self._messages.popleft()

    def send(self, message: FromRank) -> None:
        """Sends a message to the coordinator, waiting until it is written. Raises OSError if the
        coordinator has exited."""
        self._stream.send_all(self._encoder.encode(message))

    def close(self) -> None:
        """Closes the socket."""
        self._stream.close()
