"""A client that reads complete answers and retries like OpenAI's client.

The client retries for up to TRY_AGAIN_S if a connection is refused or closed before the answer
starts, and after a 429 or 503 with a `Retry-After` header. OpenAI's client gives up after two
retries, which would measure the duration of a fault rather than its effect. An answer that has
started is never retried.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import aiohttp
import msgspec

from cluster.bench.sse import EventScanner
from tests.campaigns.chaos.answers import Answer
from tests.campaigns.chaos.planned_requests import PlannedRequest

TRY_AGAIN_S: Final = 120.0
_FIRST_PAUSE_S = 0.25
_LAST_PAUSE_S = 2.0
_SILENT_S = 300.0
"""Read timeout in seconds."""
_SHORTEST_PAUSE_S = 0.25
"""Shorter pauses are not recorded."""
_MOST_CHARS = 300
End = Literal["open", "whole", "broken", "error", "left"]
"""`broken`: the connection closed during the answer. `error`: the server sent an error. `left`: the
client closed the connection."""


class Pause(NamedTuple):
    """A period in which a stream received nothing."""

    begin: float
    length_s: float


class Retry(NamedTuple):
    """A failed attempt that is retried."""

    at: float
    reason: str


@dataclass(kw_only=True, slots=True)
class Outcome:
    """Outcome of a request. Times are on the monotonic clock, which all processes share."""

    request: PlannedRequest
    sent: float
    """Time of the first attempt."""
    begun: float = 0.0
    """Time of the attempt that was answered."""
    head_at: float = 0.0
    """Time at which its status and headers were received."""
    ended: float = 0.0
    end: End = "open"
    error: str = ""
    status: int = 0
    answer: Answer = field(default_factory=Answer)
    worker: str = ""
    """Worker on which the request started, as reported by the server."""
    port: int = 0
    """Local port of the connection; identifies the processes in between."""
    retries: list[Retry] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)


class _TryAgain(Exception):
    def __init__(self, reason: str, after_s: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.after_s = after_s


class Client:
    """Client with one keep-alive connection; an async context manager."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url
        self._socket: socket.socket | None = None
        self._session: aiohttp.ClientSession | None = None
        self._response: aiohttp.ClientResponse | None = None
        self._left = False
        self.outcome: Outcome | None = None
        """Outcome of the request in flight."""

    async def __aenter__(self) -> Client:
        connector = aiohttp.TCPConnector(limit=1, socket_factory=self._connect)
        self._session = aiohttp.ClientSession(
            headers={"Content-Type": "application/json"},
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_read=_SILENT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(self, request: PlannedRequest) -> Outcome:
        """Sends a request and retries until it is answered; errors are recorded in the outcome."""
        self.outcome = outcome = Outcome(request=request, sent=time.monotonic())
        pause, self._left = _FIRST_PAUSE_S, False
        while outcome.end == "open":
            try:
                await self._attempt(request, outcome)
            except _TryAgain as again:
                if time.monotonic() - outcome.sent > TRY_AGAIN_S:
                    outcome.end = "error"
                    outcome.error = f"gave up after {len(outcome.retries)} retries: {again}"
                    break
                outcome.retries.append(Retry(time.monotonic(), again.reason))
                await asyncio.sleep(pause if again.after_s is None else again.after_s)
                pause = min(2.0 * pause, _LAST_PAUSE_S)
        if self._left:
            outcome.end = "left"
        outcome.ended = time.monotonic()
        self.outcome = None
        return outcome

    def leave(self) -> bool:
        """Resets the connection if an answer has started; otherwise returns False."""
        if self._response is None or self._socket is None:
            return False
        if self.outcome is None or not self.outcome.answer.choices:
            return False
        with suppress(OSError):  # already closed
            reset = struct.pack("ii", 1, 0)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        self._left = True
        self._response.close()
        return True

    def _connect(self, address: Any) -> socket.socket:
        family, kind, protocol, *_ = address
        self._socket = socket.socket(family, kind, protocol)
        return self._socket

    def _port(self) -> int:
        try:
            return 0 if self._socket is None else int(self._socket.getsockname()[1])
        except OSError:
            return 0

    async def _attempt(self, request: PlannedRequest, outcome: Outcome) -> None:
        assert self._session is not None
        outcome.begun = time.monotonic()
        try:
            response = await self._session.post(self._base_url + request.path, data=request.body)
        except aiohttp.ClientConnectorError as error:
            raise _TryAgain("connection refused") from error
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError):
                outcome.end, outcome.error = "error", f"no answer for {_SILENT_S:g} s"
                return
            raise _TryAgain("closed before an answer") from error
        try:
            async with response:
                self._response = response
                outcome.status, outcome.port = response.status, self._port()
                outcome.head_at = time.monotonic()
                outcome.worker = response.headers.get("x-rayfleet-worker", "")
                await self._read(response, outcome)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            outcome.end, outcome.error = "broken", f"{type(error).__name__}: {error}"[:_MOST_CHARS]
        except msgspec.DecodeError as error:
            outcome.end, outcome.error = "error", f"not JSON: {error}"
        finally:
            self._response = None

    async def _read(self, response: aiohttp.ClientResponse, outcome: Outcome) -> None:
        if response.status != 200:
            text = (await response.text())[:_MOST_CHARS]
            after = response.headers.get("Retry-After", "")
            if response.status in (429, 503) and after.isdigit():
                raise _TryAgain(f"HTTP {response.status}", float(after))
            outcome.end, outcome.error = "error", f"HTTP {response.status}: {text}"
        elif outcome.request.stream:
            await self._read_events(response, outcome)
        else:
            outcome.answer.take(msgspec.json.decode(await response.read()))
            outcome.end = "whole"

    async def _read_events(self, response: aiohttp.ClientResponse, outcome: Outcome) -> None:
        scanner, last = EventScanner(), outcome.begun
        outcome.end, outcome.error = "broken", "the stream ended without [DONE]"
        async for chunk in response.content.iter_any():
            now = time.monotonic()
            if now - last >= _SHORTEST_PAUSE_S:
                outcome.pauses.append(Pause(last, now - last))
            last = now
            for data in scanner.feed(chunk):
                if data == b"[DONE]":
                    outcome.end, outcome.error = "whole", ""
                    continue
                message = msgspec.json.decode(data)
                if message.get("error"):
                    outcome.end, outcome.error = "error", str(message["error"])[:_MOST_CHARS]
                    return
                outcome.answer.take(message)
