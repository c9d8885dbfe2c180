"""The connection between a worker's front and its engine: one Unix stream socket, both ways.

The front listens in the directory of the epoch, the engine connects. No I/O threads: with them a
report cost both ends more than twice the CPU time, on cores that the step needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from collections.abc import Sequence
from typing import cast

from worker.parallel.channel import socket_path
from worker.parallel.frames import FrameReader, frame


class EngineLink:
    """The engine's end. Payloads in, payloads out; a report waits only for a front that hangs."""

    def __init__(self, directory: str) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.connect(socket_path(directory, "front"))
        self._reader = FrameReader()
        self.is_open = True
        """False once the front has ended: nobody is left to serve."""

    def send(self, payload: bytes) -> None:
        """Sends one payload."""
        try:
            self._connection.sendall(frame(payload))
        except ConnectionError:
            self.is_open = False

    def receive(self) -> list[bytes]:
        """All payloads that are here; does not wait."""
        with contextlib.suppress(BlockingIOError):
            while self.is_open:
                self.is_open = self._reader.fill(self._connection, socket.MSG_DONTWAIT)
        payloads = []
        while (payload := self._reader.next()) is not None:
            payloads.append(payload)
        return payloads

    def wait(self, other_fds: Sequence[int] = (), timeout_s: float | None = None) -> None:
        """Blocks until something came, one of `other_fds` is readable, or time has run out."""
        poller = select.poll()
        for fd in (self._connection.fileno(), *other_fds):
            poller.register(fd, select.POLLIN)
        poller.poll(None if timeout_s is None else timeout_s * 1e3)

    def close(self) -> None:
        """Closes the connection; what was sent can still be read."""
        self._connection.close()


class FrontLink(asyncio.Protocol):
    """The front's end, on its event loop. Nothing here waits, whatever the engine does."""

    def __init__(self, directory: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(socket_path(directory, "front"))
        self._listener.listen(1)
        self._listener.setblocking(False)
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader()
        self._payloads: asyncio.Queue[bytes] = asyncio.Queue()

    async def accept(self) -> None:
        """Waits for the engine to connect."""
        loop = asyncio.get_running_loop()
        connection, _ = await loop.sock_accept(self._listener)
        await loop.connect_accepted_socket(lambda: self, connection)

    async def receive(self) -> bytes:
        """The engine's next payload; waits for ever once the engine has ended."""
        return await self._payloads.get()

    def send(self, payload: bytes) -> None:
        """Queues one payload; before the engine has connected there is nothing to tell it."""
        if self._transport is not None:
            self._transport.write(frame(payload))

    def close(self) -> None:
        """Drops what is unsent."""
        if self._transport is not None:
            self._transport.abort()
        self._transport = None
        self._listener.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        # uvloop's transports are none by inheritance.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._reader.feed(data)
        while (payload := self._reader.next()) is not None:
            self._payloads.put_nowait(payload)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._transport = None
