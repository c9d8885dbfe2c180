"""The gateway's end of the stream socket to a worker on the same node (`worker.wire.frames`)."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from typing import Self, cast

import msgspec

from worker.wire.frames import ATTACH, CALL, FAILURE, ITEM, REPLY, Attach, FrameReader, frame


class WorkerLink(asyncio.Protocol):
    """One worker's attach stream, an iterator of WorkerItems, and calls on the same connection.

    It ends with the connection, which the worker's death ends at once.
    """

    def __init__(self) -> None:
        self._reader = FrameReader()
        self._transport: asyncio.Transport
        self._items: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = itertools.count(1)
        self._end: str | None = None
        """Why no more items will come."""

    @classmethod
    async def open(cls, path: str, gateway_id: str) -> Self:
        """Connects to a worker's socket and attaches. Raises OSError."""
        _, link = await asyncio.get_running_loop().create_unix_connection(cls, path)
        link._send(ATTACH, 0, msgspec.msgpack.encode(Attach(gateway_id)))
        return link

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        """The next item. Raises ConnectionError when the connection is gone."""
        while not self._items:
            if self._end is not None:
                raise ConnectionError(self._end)
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._items.popleft()

    async def call(self, payload: bytes) -> bytes:
        """Sends a SubmitBatch, returns the SubmitReply.

        Raises:
            ConnectionError: the connection is gone, or the worker could not take it.
        """
        if self._end is not None:
            raise ConnectionError(self._end)
        number = next(self._numbers)
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._calls[number] = reply
        try:
            self._send(CALL, number, payload)
            return await reply
        finally:
            del self._calls[number]

    def close(self, reason: str = "the connection was closed here") -> None:
        """Detaches: the worker aborts what this gateway has there."""
        self._finish(reason)
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        # Not an assertion: uvloop's transports are no subclasses.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        try:
            frames = self._reader.feed(data)
        except ConnectionError as error:
            self.close(f"the worker sent {error}")
            return
        for kind, call, payload in frames:
            if kind == ITEM:
                self._items.append(payload)
            elif (reply := self._calls.get(call)) is not None and not reply.done():
                if kind == REPLY:
                    reply.set_result(payload)
                elif kind == FAILURE:
                    reply.set_exception(ConnectionError(payload.decode(errors="replace")))
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._finish("the worker closed the connection" if exc is None else str(exc))

    def _send(self, kind: int, call: int, payload: bytes) -> None:
        self._transport.write(frame(kind, call, payload))

    def _finish(self, reason: str) -> None:
        if self._end is not None:
            return
        self._end = reason
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(ConnectionError(reason))
        self._wake()

    def _wake(self) -> None:
        if (
            self._waiter is not None
            and not self._waiter.done()
            and (self._items or self._end is not None)
        ):
            self._waiter.set_result(None)
