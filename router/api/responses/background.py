"""BackgroundRun: a response that runs without a client. EventLog: its events, which clients can
read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec
from starlette.types import Message, Scope

from router.api.http.account import Account
from router.api.http.parts import SEND_PART
from router.api.openai.pings import COMMENT
from router.api.openai.response import GenerationResponse
from router.errors import ApiError

END = b"\n\n"
"""Bytes that end a server-sent event."""


class EventLog:
    """The server-sent events of a streamed response, which any number of clients can read.

    Args:
        ping_s: seconds without an event after which clients get a ping.
        events: all events of a completed response; None for a new response.
    """

    def __init__(self, ping_s: float, events: bytes | None = None) -> None:
        self._ping_s = ping_s
        self.is_over = events is not None
        """Whether no more events will follow."""
        self._events = [] if events is None else events.split(END)[:-1]
        self._rest = b""
        """Bytes of an event that is not complete yet."""
        self._news = asyncio.Event()

    def add(self, data: bytes) -> None:
        """Appends bytes of the stream."""
        *events, self._rest = (self._rest + data).split(END)
        self._events += events
        self._wake()

    def close(self) -> None:
        """Marks the stream as complete."""
        self.is_over = True
        self._wake()

    @property
    def events(self) -> bytes:
        """Bytes of all events so far."""
        return b"".join(event + END for event in self._events)

    async def follow(self, after: int) -> AsyncIterator[bytes]:
        """Yields the events numbered above `after`, then new ones as they arrive. Pings have no
        number."""
        at = after + 1
        while True:
            events, is_over, news = self._events[at:], self.is_over, self._news
            at += len(events)
            if events:
                yield b"".join(event + END for event in events)
            elif is_over:
                return
            else:
                try:
                    async with asyncio.timeout(self._ping_s):
                        await news.wait()
                except TimeoutError:
                    yield COMMENT

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class BackgroundRun:
    """Runs a response to completion; until then it counts as an open request of its API key.

    Args:
        response: the response, not started yet.
        scope: ASGI scope of the request.
        account: account of the request.
        failed: called with the error if one is sent instead of the response; returns its events.
        ended: called when the run has ended.
        log: receives the events of the response; None if it is not streamed.
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
        """Aborts the response, and waits for its end."""
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
            self._account.end_request()
            if self.log is not None:
                self.log.close()
            self._ended()

    async def _receive(self) -> Message:
        """ASGI's receive: reports a disconnected client when the run is cancelled."""
        await self._leave.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        """ASGI's send: handles an error's body, or events for the log. Without a log the body is
        dropped, since the writer stores the response."""
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
