"""A response that goes on without its client, who comes back for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec
from starlette.types import Message, Scope

from router.api.account import Account
from router.api.parts import SEND_PART
from router.api.response import GenerationResponse
from router.errors import ApiError

END = b"\n\n"
"""End of an event."""


class EventLog:
    """The events of a response that is streamed, for any number of clients.

    Args:
        told: those of a response that has ended; None for one that begins.
    """

    def __init__(self, told: bytes | None = None) -> None:
        self.is_over = told is not None
        """Whether no more will come."""
        self._events = [] if told is None else told.split(END)[:-1]
        self._rest = b""
        """The part of the next event that has come."""
        self._news = asyncio.Event()

    def add(self, data: bytes) -> None:
        """More of the stream."""
        *events, self._rest = (self._rest + data).split(END)
        self._events += events
        self._wake()

    def close(self) -> None:
        """Notes that the stream has ended."""
        self.is_over = True
        self._wake()

    @property
    def told(self) -> bytes:
        """All of it so far."""
        return b"".join(event + END for event in self._events)

    async def follow(self, after: int) -> AsyncIterator[bytes]:
        """The events behind number `after`, those to come as they come."""
        at = after + 1
        while True:
            events, is_over, news = self._events[at:], self.is_over, self._news
            at += len(events)
            if events:
                yield b"".join(event + END for event in events)
            elif is_over:
                return
            else:
                await news.wait()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class BackgroundRun:
    """Runs a response to its end; counts as an open request of its key for as long.

    Args:
        response: not started yet.
        scope: of the request that asked for it.
        account: of that request.
        failed: is called with the error where one ends it before anything is told; returns the
            events for it.
        ended: is called last.
        log: gets its events; None where it is not streamed.
    """

    def __init__(
        self,
        response: GenerationResponse,
        scope: Scope,
        account: Account,
        failed: Callable[[ApiError], bytes],
        ended: Callable[[], object],
        log: EventLog | None = None,
    ) -> None:
        self._response = response
        self._account = account
        self._failed = failed
        self._ended = ended
        self.log = log
        self._leave = asyncio.Event()
        self._status = 200
        account.is_held = True
        self._task = asyncio.create_task(self._run(scope))

    async def cancel(self) -> None:
        """Ends it, and waits until it has ended."""
        self._leave.set()
        await asyncio.wait([self._task])

    async def _run(self, scope: Scope) -> None:
        try:
            scope = {**scope, SEND_PART: self._send}
            await self._response(scope, self._receive, self._send)
        except Exception:
            self._fail(ApiError(500, "internal server error"))
            raise
        finally:
            self._account.end()
            if self.log is not None:
                self.log.close()
            self._ended()

    async def _receive(self) -> Message:
        """Its client has left when it is cancelled, not before."""
        await self._leave.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        """Its events are kept; of another, the writer keeps what it has written. Errors come as
        bodies."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif self._status >= 400:
            error = msgspec.json.decode(message["body"])["error"]
            self._fail(ApiError(self._status, error["message"]))
        elif self.log is not None:
            self.log.add(message["body"])

    def _fail(self, error: ApiError) -> None:
        events = self._failed(error)
        if self.log is not None:
            self.log.add(events)
