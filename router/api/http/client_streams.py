"""ClientStreams: aborts responses whose clients read too slowly and fill the memory."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.types import Message, Send

from router.serving import Generation

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamLimits:
    """Limits on clients that read responses slowly, and intervals of pings."""

    stalled_s: float = 60.0
    """Seconds after which a client that reads nothing is disconnected; the same as HAProxy's
    timeout."""
    unread_bytes: int = 16 * 2**20
    """Maximum number of unread bytes of a stream, which only many completions with
    log-probabilities reach."""
    total_unread_bytes: int = 64 * 2**20
    """Maximum number of unread bytes of all blocked streams; above it, the largest ones are
    aborted."""
    period_s: float = 1.0
    """Seconds between checks for clients that read too slowly."""
    accepted_ping_s: float = 1.0
    """Seconds without output, counted from when a worker accepts the request, after which the head
    of the stream and a first ping are sent. Errors before that still set the HTTP status."""
    unplaced_ping_s: float = 6.0
    """Like `accepted_ping_s`, for requests that wait for a worker. Exceeds the 5 s after which a
    request is rejected if no worker becomes ready (router.serving.placing.ATTACH_S)."""
    ping_s: float = 10.0
    """Seconds of silence between pings. Some versions of Claude Code give up after 15 s without an
    event; others report a delay after 20 s."""


class ClientStreams:
    """Watches the clients that are reading responses of one gateway, on its event loop."""

    def __init__(self, limits: StreamLimits | None = None) -> None:
        self.limits = limits or StreamLimits()
        self._streams: set[ClientStream] = set()
        self._is_sweeping = False

    @asynccontextmanager
    async def watched(self, send: Send, generation: Generation) -> AsyncIterator[ClientStream]:
        """Context manager that cancels its block if the client reads too slowly.

        The caller closes the generation.

        Args:
            send: sends to the client.
            generation: the generation of the response.
        """
        timeout = asyncio.timeout(None)
        stream = ClientStream(send, generation, timeout)
        try:
            async with timeout:
                self._streams.add(stream)
                self._sweep_later()
                try:
                    yield stream
                finally:
                    self._streams.discard(stream)
        except TimeoutError:
            if not timeout.expired():
                raise

    def _sweep_later(self) -> None:
        """Starts the timer for the next check if there are clients and no timer is running."""
        if not self._is_sweeping and self._streams:
            self._is_sweeping = True
            asyncio.get_running_loop().call_later(self.limits.period_s, self._sweep)

    def _sweep(self) -> None:
        limits, now = self.limits, asyncio.get_running_loop().time()
        self._is_sweeping = False
        blocked = [(s.num_unread_bytes, s) for s in self._streams if s.is_blocked(now)]
        total = sum(num_bytes for num_bytes, _ in blocked)
        for num_bytes, stream in sorted(blocked, key=lambda entry: entry[0], reverse=True):
            if total > limits.total_unread_bytes or num_bytes > limits.unread_bytes:
                stream.end(f"client has {num_bytes} unread bytes")
                total -= num_bytes
            elif now - stream.blocked_at >= limits.stalled_s:
                stream.end(f"client has read nothing for {limits.stalled_s:.0f} s")
        self._sweep_later()


class ClientStream:
    """The client of one response, and the progress of the messages sent to it.

    Code that sends messages without `send` sets `begun` and `done` itself. They are plain
    attributes because they are set for each token.

    Args:
        send: sends to the client.
        generation: the generation of the response.
        timeout: timeout of the response's block.
    """

    __slots__ = ("_generation", "_seen", "_send", "_timeout", "begun", "blocked_at", "done")

    def __init__(self, send: Send, generation: Generation, timeout: asyncio.Timeout) -> None:
        self.begun: Message | None = None
        """The last message that was passed to the server."""
        self.done: Message | None = None
        """The last message that the server has accepted."""
        self.blocked_at = math.inf
        """Event loop time at which `is_blocked` first saw the message that is waiting."""
        self._seen: Message | None = None
        """The message that was waiting at the last call of `is_blocked`; None if there is none."""
        self._send = send
        self._generation = generation
        self._timeout = timeout

    def is_blocked(self, now: float) -> bool:
        """Whether a message is waiting to be accepted. Called once per period, which is the
        resolution of `blocked_at`."""
        if self.begun is self.done:
            self._seen = None
            return False
        if self._seen is not self.begun:
            self._seen, self.blocked_at = self.begun, now
        return True

    @property
    def num_unread_bytes(self) -> int:
        """Bytes waiting for the client: the last two messages and tokens not written yet.

        0 for non-streaming responses, which are in memory before the client can read them.
        """
        if not self._generation.request.stream:
            return 0
        unread = sum(completion.num_unread_bytes for completion in self._generation.completions)
        return _num_bytes(self.done) + _num_bytes(self.begun) + unread

    async def send(self, message: Message) -> None:
        """Sends a message, and records its start and end."""
        self.begun = message
        await self._send(message)
        self.done = message

    def end(self, reason: str) -> None:
        """Cancels the response's block, unless it is ending already."""
        if not self._timeout.expired():
            request_id = self._generation.request.request_id
            logger.warning("aborting response %s: %s", request_id, reason)
            self._timeout.reschedule(0.0)


def _num_bytes(message: Message | None) -> int:
    return 0 if message is None else len(message.get("body", b""))
