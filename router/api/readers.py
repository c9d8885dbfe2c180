"""Ends responses whose clients do not read: what is left unread is held here in the meantime."""

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
class ReaderLimits:
    """How patient a gateway is with clients that are sent a response."""

    stalled_s: float = 60.0
    """Seconds for which a client may take nothing at all; HAProxy waits for as long."""
    unread_bytes: int = 16 * 2**20
    """Unread bytes of one stream; only n times many log-probabilities are so many."""
    total_unread_bytes: int = 64 * 2**20
    """Unread bytes of all streams that wait; beyond them those with the most are ended."""
    period_s: float = 1.0
    """How often they are looked at."""


class Readers:
    """The clients of one gateway. Belongs to its event loop."""

    def __init__(self, limits: ReaderLimits | None = None) -> None:
        self._limits = limits or ReaderLimits()
        self._readers: set[Reader] = set()
        self._is_sweeping = False

    @asynccontextmanager
    async def watched(self, send: Send, generation: Generation) -> AsyncIterator[Reader]:
        """The client that `send` reaches, in a block that is left early when it does not read.

        The generation is the caller's to close.
        """
        timeout = asyncio.timeout(None)
        reader = Reader(send, generation, timeout)
        try:
            async with timeout:
                self._readers.add(reader)
                self._sweep_later()
                try:
                    yield reader
                finally:
                    self._readers.discard(reader)
        except TimeoutError:
            if not timeout.expired():
                raise

    def _sweep_later(self) -> None:
        """One timer for all, and none where nobody is sent anything."""
        if not self._is_sweeping and self._readers:
            self._is_sweeping = True
            asyncio.get_running_loop().call_later(self._limits.period_s, self._sweep)

    def _sweep(self) -> None:
        limits, now = self._limits, asyncio.get_running_loop().time()
        self._is_sweeping = False
        blocked = [(r.num_unread_bytes, r) for r in self._readers if r.is_blocked(now)]
        total = sum(num_bytes for num_bytes, _ in blocked)
        for num_bytes, reader in sorted(blocked, key=lambda entry: entry[0], reverse=True):
            if total > limits.total_unread_bytes or num_bytes > limits.unread_bytes:
                reader.end(f"its client leaves {num_bytes} bytes unread")
                total -= num_bytes
            elif now - reader.blocked_at >= limits.stalled_s:
                reader.end(f"its client has read nothing for {limits.stalled_s:.0f} s")
        self._sweep_later()


class Reader:
    """One client, as its response's `send` shows it.

    Whoever sends by another way than `send` says here what is `begun` and what is `done`: two
    assignments, since a stream has a message per token.
    """

    __slots__ = ("_generation", "_seen", "_send", "_timeout", "begun", "blocked_at", "done")

    def __init__(self, send: Send, generation: Generation, timeout: asyncio.Timeout) -> None:
        self.begun: Message | None = None
        """The last message that was to be sent."""
        self.done: Message | None = None
        """The last message that the server has taken."""
        self.blocked_at = math.inf
        """Event loop's time at which `is_blocked` first saw the message that waits."""
        self._seen: Message | None = None
        self._send = send
        self._generation = generation
        self._timeout = timeout

    def is_blocked(self, now: float) -> bool:
        """Whether a message waits to be taken; asked once a period, which is how exactly the
        wait is known."""
        if self.begun is self.done:
            self._seen = None
            return False
        if self._seen is not self.begun:
            self._seen, self.blocked_at = self.begun, now
        return True

    @property
    def num_unread_bytes(self) -> int:
        """Bytes of the last message, which the server holds, of this one, and of those to come.

        What a whole response holds was there before it could be read: it counts as nothing.
        """
        if not self._generation.request.stream:
            return 0
        unread = sum(completion.num_unread_bytes for completion in self._generation.completions)
        return _num_bytes(self.done) + _num_bytes(self.begun) + unread

    async def send(self, message: Message) -> None:
        """Sends a message, and notes when it is taken."""
        self.begun = message
        await self._send(message)
        self.done = message

    def end(self, reason: str) -> None:
        """Leaves the response's block, if that is not under way already."""
        if not self._timeout.expired():
            request_id = self._generation.request.request_id
            logger.warning("ends response %s: %s", request_id, reason)
            self._timeout.reschedule(0.0)


def _num_bytes(message: Message | None) -> int:
    return 0 if message is None else len(message.get("body", b""))
