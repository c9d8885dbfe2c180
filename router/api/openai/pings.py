"""Pings: keeps streams alive while they have no output, because clients and proxies time out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from router.api.http.client_streams import StreamLimits

COMMENT = b": ping\n\n"
"""A server-sent comment, which clients skip."""


class Pings:
    """Sends pings while a stream has no output.

    There is no output while a request waits for a worker or in a worker's queue, during prefill,
    and during reasoning that is not shown.

    A ping is sent by a separate task, and only while the stream's task waits; the stream's task
    calls `finish` before it sends anything. The cost is one timer per stream, and two assignments
    per part.

    Args:
        send: sends a ping, after the head of the stream if that has not been sent.
        limits: intervals of pings.
    """

    __slots__ = (
        "_first_at",
        "_handle",
        "_limits",
        "_loop",
        "_send",
        "is_waiting",
        "sent_at",
        "task",
    )

    def __init__(self, send: Callable[[], Awaitable[None]], limits: StreamLimits) -> None:
        self._send = send
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self.is_waiting = True
        """Whether the stream's task waits for output."""
        self.sent_at: float | None = None
        """Event loop time at which the last part was sent; None before the first."""
        self.task: asyncio.Task[None] | None = None
        """Task that sends a ping; None once `finish` has awaited it."""
        self._first_at = self._loop.time() + limits.unplaced_ping_s
        """Event loop time of the first ping, if nothing is sent before it."""
        self._handle = self._loop.call_at(self._first_at, self._due)

    def accepted(self) -> None:
        """Records that a worker has accepted the request."""
        self._first_at = self._loop.time() + self._limits.accepted_ping_s
        if self.sent_at is None:
            self._schedule(self._first_at)

    async def finish(self) -> None:
        """Waits for the ping in flight, if any."""
        if self.task is not None:
            await self.task
            self.task = None

    def close(self) -> None:
        """Stops sending pings."""
        self._handle.cancel()
        if self.task is not None and not self.task.cancel() and not self.task.cancelled():
            self.task.exception()  # the client has disconnected

    def _due(self) -> None:
        """Sends a ping if the stream has been silent, and schedules the next check."""
        now, period_s = self._loop.time(), self._limits.ping_s
        due_at = self._first_at if self.sent_at is None else self.sent_at + period_s
        if now < due_at:
            self._schedule(due_at)
            return
        if self.is_waiting and (self.task is None or self.task.done()):
            self.sent_at = now
            self.task = self._loop.create_task(self._ping())
        self._schedule(now + period_s)

    async def _ping(self) -> None:
        await self._send()

    def _schedule(self, at: float) -> None:
        self._handle.cancel()
        self._handle = self._loop.call_at(at, self._due)
