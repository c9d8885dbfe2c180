"""WorkerLink: the gateway's end of a Unix socket to a worker on the same node."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Self, cast

import msgspec

from worker.protocol.frames import (
    MAX_PAYLOAD_BYTES,
    Attach,
    Call,
    CallFailure,
    FrameReader,
    Item,
    Reply,
    ToGateway,
    frame,
)


class WorkerLink(asyncio.Protocol):
    """A worker's attach stream, with submits on the same connection.

    The kernel closes the connection when the worker's process exits, which ends the link at once.
    Messages are framed as in `worker.protocol.frames`.

    Args:
        on_item: called with each encoded WorkerItem as soon as it is received; an exception that it
            raises ends the link.
    """

    def __init__(self, on_item: Callable[[bytes], None]) -> None:
        self._on_item = on_item
        self._reader = FrameReader()
        self._decode = msgspec.msgpack.Decoder(ToGateway).decode
        self._transport: asyncio.Transport
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        """Pending replies by call number."""
        self._numbers = itertools.count(1)
        self._end: str | None = None
        """Reason for the end of the link; None until it ends."""
        self._ended = asyncio.Event()

    @classmethod
    async def open(cls, path: str, gateway_id: str, on_item: Callable[[bytes], None]) -> Self:
        """Connects to a worker's socket and attaches. Raises OSError."""
        loop = asyncio.get_running_loop()
        _, link = await loop.create_unix_connection(lambda: cls(on_item), path)
        link._transport.write(frame(msgspec.msgpack.encode(Attach(gateway_id))))
        return link

    async def wait_ended(self) -> str:
        """Waits for the end of the link; returns its reason."""
        await self._ended.wait()
        assert self._end is not None
        return self._end

    async def call(self, payload: bytes) -> bytes:
        """Sends an encoded SubmitBatch and returns the encoded SubmitReply.

        Raises:
            ConnectionError: the link has ended, or the worker could not process the batch.
        """
        if self._end is not None:
            raise ConnectionError(self._end)
        number = next(self._numbers)
        message = msgspec.msgpack.encode(Call(number, payload))
        if len(message) > MAX_PAYLOAD_BYTES:
            # HAZARD: the worker treats such a frame as a broken stream, and drops all requests.
            raise ConnectionError(
                f"a batch of {len(message)} bytes exceeds the maximum frame size of "
                f"{MAX_PAYLOAD_BYTES} bytes"
            )
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._calls[number] = reply
        try:
            self._transport.write(frame(message))
            return await reply
        finally:
            del self._calls[number]

    def close(self, reason: str = "the gateway closed the connection") -> None:
        """Ends the link: the worker aborts all requests of this gateway."""
        self._finish(reason)
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Stores the transport of the open connection; see asyncio.Protocol."""
        # Not an assertion: uvloop's transports are not subclasses.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Dispatches the items and replies in received bytes; see asyncio.Protocol."""
        try:
            for payload in self._reader.feed(data):
                if self._end is not None:
                    return
                message = self._decode(payload)
                if isinstance(message, Item):
                    self._on_item(message.payload)
                else:
                    self._take_answer(message)
        except Exception as error:
            self.close(f"invalid data from the worker: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the link and all calls; see asyncio.Protocol."""
        self._finish("the worker closed the connection" if exc is None else str(exc))

    def _take_answer(self, answer: Reply | CallFailure) -> None:
        reply = self._calls.get(answer.number)
        if reply is None or reply.done():
            return  # the caller was cancelled
        if isinstance(answer, Reply):
            reply.set_result(answer.payload)
        else:
            reply.set_exception(ConnectionError(answer.error))

    def _finish(self, reason: str) -> None:
        if self._end is not None:
            return
        self._end = reason
        self._ended.set()
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(ConnectionError(reason))
