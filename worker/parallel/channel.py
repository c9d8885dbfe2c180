"""The sockets between a worker group's coordinator and its ranks: PUSH/PULL per rank over ipc.

PUB/SUB would drop messages silently; PUSH without a high-water mark never does, and every Plan
carries a sequence number besides. Payloads are msgspec structs, never pickle. The directory that
holds the endpoints is private to the group's user.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import zmq

from worker.parallel.messages import FromRank, ToRank

LINGER_MS = 500
"""How long a closing socket may still flush, so that a rank's last word arrives."""


def endpoint(directory: str, name: str) -> str:
    """The ipc address of a socket in the group's directory.

    Raises:
        ValueError: the path is longer than a Unix socket address can be.
    """
    path = f"{directory}/{name}"
    if len(path.encode()) > 107:
        raise ValueError(f"socket path {path!r} exceeds 107 bytes: choose a shorter directory")
    return f"ipc://{path}"


def open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """A socket without a high-water mark, so that no message is ever dropped or blocks a step."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    return socket


class CoordinatorChannel:
    """The coordinator's end: one PUSH per rank, one PULL from all of them."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], directory: str, ranks: Sequence[int]
    ) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromRank)
        self._incoming = open_socket(context, zmq.PULL)
        self._incoming.bind(endpoint(directory, "ranks"))
        self._outgoing: list[zmq.Socket[bytes]] = []
        for rank in ranks:
            socket = open_socket(context, zmq.PUSH)
            socket.connect(endpoint(directory, f"rank-{rank}"))
            self._outgoing.append(socket)

    @property
    def incoming(self) -> zmq.Socket[bytes]:
        """For polling beside other sockets."""
        return self._incoming

    def send(self, message: ToRank) -> None:
        """Sends one message to every rank; encoded once."""
        payload = self._encoder.encode(message)
        for socket in self._outgoing:
            socket.send(payload, zmq.NOBLOCK)

    def receive(self) -> FromRank:
        """The next message of any rank; blocks."""
        message: FromRank = self._decoder.decode(self._incoming.recv())
        return message

    def close(self) -> None:
        """Closes all sockets after a short flush."""
        for socket in (*self._outgoing, self._incoming):
            socket.close()


class RankChannel:
    """A rank's end: one PULL for Plans, one PUSH to the coordinator."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], directory: str, rank: int) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToRank)
        self._incoming = open_socket(context, zmq.PULL)
        self._incoming.bind(endpoint(directory, f"rank-{rank}"))
        self._outgoing = open_socket(context, zmq.PUSH)
        self._outgoing.connect(endpoint(directory, "ranks"))

    def receive(self) -> ToRank:
        """The next message of the coordinator; blocks."""
        message: ToRank = self._decoder.decode(self._incoming.recv())
        return message

    def send(self, message: FromRank) -> None:
        """Queues one message for the coordinator."""
        self._outgoing.send(self._encoder.encode(message))

    def close(self) -> None:
        """Closes both sockets after a short flush."""
        self._outgoing.close()
        self._incoming.close()
