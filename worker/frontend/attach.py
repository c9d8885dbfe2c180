"""Attach server: the frontend's Unix stream socket for gateways on its node.

It carries the same messages as calls over Serve, at the cost of one system call each. The socket's
directory is only accessible to the user of this process. A connection is one gateway's attach
stream, which ends when either side closes the connection or exits.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from typing import cast

import msgspec

from worker.frontend.attachment import Attachment
from worker.frontend.server import WorkerFrontend
from worker.protocol.frames import (
    Attach,
    Call,
    CallFailure,
    FrameReader,
    FromGateway,
    Item,
    Reply,
    frame,
)

logger = logging.getLogger(__name__)


class AttachServer:
    """Serves a frontend to gateways on its node, from `open` to `close`."""

    def __init__(self, frontend: WorkerFrontend, parent_directory: str = "/tmp") -> None:
        self.path: str | None = None
        """Path of the socket; None unless it is open."""
        self._frontend = frontend
        self._parent_directory = parent_directory
        self._directory: str | None = None
        self._server: asyncio.AbstractServer | None = None
        self._closed = asyncio.Event()

    async def open(self) -> None:
        """Starts listening. Raises OSError if the socket cannot be created."""
        loop = asyncio.get_running_loop()
        # mkdtemp sets mode 0700.
        self._directory = tempfile.mkdtemp(prefix="rf-", dir=self._parent_directory)
        path = f"{self._directory}/attach"
        self._server = await loop.create_unix_server(lambda: _Connection(self._frontend), path)
        self.path = path

    async def wait_closed(self) -> None:
        """Waits until the server is closed."""
        await self._closed.wait()

    def close(self) -> None:
        """Stops listening; open connections remain until their streams end."""
        self.path = None
        self._closed.set()
        if self._server is not None:
            self._server.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


class _Connection(asyncio.Protocol):
    """Connection to one gateway. Items are written synchronously as soon as they are available."""

    def __init__(self, frontend: WorkerFrontend) -> None:
        self._frontend = frontend
        self._reader = FrameReader()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromGateway).decode
        self._transport: asyncio.Transport
        self._paused = False
        self._gateway_id: str | None = None
        self._attachment = Attachment(self._flush)
        self._answers: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not asserted: uvloop's transports are not subclasses.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._reader.feed(data):
                message = self._decode(payload)
                if isinstance(message, Attach) == (self._gateway_id is not None):
                    raise ConnectionError(f"unexpected message {type(message).__name__}")
                if isinstance(message, Attach):
                    self._gateway_id = message.gateway_id
                    self._frontend.add(self._gateway_id, self._attachment)
                    continue
                task = asyncio.create_task(self._answer(message))
                self._answers.add(task)
                task.add_done_callback(self._answers.discard)
        except (ConnectionError, msgspec.DecodeError) as error:
            logger.warning("disconnecting gateway %s: %s", self._gateway_id, error)
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._gateway_id is not None:
            self._frontend.remove(self._gateway_id, self._attachment)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._flush()

    def _flush(self) -> None:
        """Sends pending items; if the gateway is not reading, they are merged instead."""
        attachment = self._attachment
        while not self._paused and (item := attachment.take_item()) is not None:
            self._transport.write(frame(self._encode(Item(self._encode(item)))))
        if attachment.ended and not self._paused:
            self._transport.close()

    async def _answer(self, call: Call) -> None:
        answer: Reply | CallFailure
        try:
            answer = Reply(call.number, await self._frontend.submit(call.payload))
        except Exception as error:
            logger.exception("error while handling a submit")
            answer = CallFailure(call.number, f"{type(error).__name__}: {error}")
        if not self._transport.is_closing():
            self._transport.write(frame(self._encode(answer)))
