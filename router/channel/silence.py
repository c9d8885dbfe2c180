"""Silence: decides when a worker whose stream has no items counts as failed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

TICK_S = 0.25
"""Seconds per tick. Ticks are counted instead of time, so that a stall of this process is not
attributed to the worker."""
SILENT_TICKS = 8
"""Ticks without an item or sign of life after which a worker fails. Items arrive every 250 ms."""
SILENT_TICKS_AT_FIRST = 40
"""Ticks without an item after which a worker fails that is still attaching, which takes
longer."""
ASK_TICKS = 4
"""Ticks without an item after which signs of life are read. A worker whose event loop is blocked
has them, and will resume its requests soon; a stopped or exited one does not."""
BUSY_TICKS = 120
"""Ticks without an item after which a worker with signs of life also fails: half a minute."""


class Silence:
    """Counts ticks without an item on an attach stream.

    Args:
        pulse: reads the worker's last sign of life, see WorkerTransport.pulse.
    """

    def __init__(self, pulse: Callable[[], Awaitable[bytes | None]]) -> None:
        self._pulse = pulse
        self._num_ticks = 0
        """Ticks since the last item."""
        self._num_lifeless = 0
        """Ticks since the last item or sign of life."""
        self._last: bytes | None = None
        """The last sign of life that was read."""
        self._has_last = False
        """Whether `_last` was read since the last item, so that a different sign of life is a new
        one."""
        self._question: asyncio.Task[bytes | None] | None = None
        """Call of `pulse`."""

    def received(self) -> None:
        """Resets the counts: an item has arrived."""
        self._num_ticks = self._num_lifeless = 0

    def tick(self, *, is_attached: bool) -> str | None:
        """Counts a tick; returns the reason if the worker has failed, else None."""
        if not self._num_ticks:
            self.close()
            self._has_last = False  # signs since then were not read
        self._num_ticks += 1
        self._num_lifeless += 1
        if not is_attached:
            return (
                _silent(SILENT_TICKS_AT_FIRST) if self._num_ticks > SILENT_TICKS_AT_FIRST else None
            )
        if self._num_ticks >= ASK_TICKS:
            self._ask()
        if self._num_lifeless > SILENT_TICKS:
            return _silent(SILENT_TICKS)
        if self._num_ticks > BUSY_TICKS:
            return f"event loop blocked for {BUSY_TICKS * TICK_S:.0f} s"
        return None

    def close(self) -> None:
        """Cancels a call of `pulse`."""
        if self._question is not None:
            self._question.cancel()
            self._question = None

    def _ask(self) -> None:
        question = self._question
        if question is not None and not question.done():
            return
        self._question = asyncio.ensure_future(self._pulse())
        if question is None or question.cancelled() or question.exception() is not None:
            return
        sign = question.result()
        if self._has_last and sign != self._last:
            self._num_lifeless = 0
        self._last, self._has_last = sign, True


def _silent(num_ticks: int) -> str:
    return f"no heartbeat for {num_ticks * TICK_S:.0f} s"
