"""HeartbeatTimeout: decides when a worker whose stream has no items counts as failed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

TICK_S = 0.25
"""Seconds per tick. Ticks are counted instead of time, so that a stall of this process is not
attributed to the worker."""
SILENT_TICKS = 8
"""Ticks without an item or heartbeat after which a worker counts as failed. Items arrive every
250 ms."""
SILENT_TICKS_AT_FIRST = 40
"""Ticks without an item after which a worker that is still attaching counts as failed; attaching
takes longer."""
PULSE_TICKS = 4
"""Ticks without an item after which heartbeats are read: a worker whose event loop is blocked
still publishes them, and will resume its requests soon; a stopped or exited one does not."""
BUSY_TICKS = 120
"""Ticks without an item after which a worker counts as failed even if it has heartbeats: half a
minute."""


class HeartbeatTimeout:
    """Counts ticks without an item on an attach stream.

    Args:
        heartbeat: reads the worker's last heartbeat (see WorkerTransport.heartbeat).
    """

    def __init__(self, heartbeat: Callable[[], Awaitable[bytes | None]]) -> None:
        self._heartbeat = heartbeat
        self._num_ticks = 0
        """Ticks since the last item."""
        self._num_lifeless = 0
        """Ticks since the last item or heartbeat."""
        self._last: bytes | None = None
        """The last heartbeat that was read."""
        self._has_last = False
        """Whether `_last` was read since the last item, so that a heartbeat that differs from it is
        new."""
        self.received = False
        """Whether an item has arrived since the last tick; set by the stream."""
        self._pulse_task: asyncio.Task[bytes | None] | None = None
        """Running call of `heartbeat`; None if there is none."""

    def tick(self, *, is_attached: bool) -> str | None:
        """Counts a tick; returns the reason if the worker has failed, otherwise None."""
        if self.received:
            self.received = False
            self._num_ticks = self._num_lifeless = 0
            self.close()
            self._has_last = False  # signs since then were not read
        self._num_ticks += 1
        self._num_lifeless += 1
        if not is_attached:
            return (
                _no_heartbeat(SILENT_TICKS_AT_FIRST)
                if self._num_ticks > SILENT_TICKS_AT_FIRST
                else None
            )
        if self._num_ticks >= PULSE_TICKS:
            self._read_heartbeat()
        if self._num_lifeless > SILENT_TICKS:
            return _no_heartbeat(SILENT_TICKS)
        if self._num_ticks > BUSY_TICKS:
            return f"event loop blocked for {BUSY_TICKS * TICK_S:.0f} s"
        return None

    def close(self) -> None:
        """Cancels the running call of `heartbeat`, if any."""
        if self._pulse_task is not None:
            self._pulse_task.cancel()
            self._pulse_task = None

    def _read_heartbeat(self) -> None:
        task = self._pulse_task
        if task is not None and not task.done():
            return
        self._pulse_task = asyncio.ensure_future(self._heartbeat())
        if task is None or task.cancelled() or task.exception() is not None:
            return
        sign = task.result()
        if self._has_last and sign != self._last:
            self._num_lifeless = 0
        self._last, self._has_last = sign, True


def _no_heartbeat(num_ticks: int) -> str:
    return f"no heartbeat for {num_ticks * TICK_S:.0f} s"
