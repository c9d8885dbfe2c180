"""How long a worker that says nothing is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

TICK_S = 0.25
SILENT_TICKS = 8
"""An item comes every 250 ms; two seconds without one mean lost. Ticks are counted rather than
time measured, so that a stall of this process is not taken for one of the worker."""
SILENT_TICKS_AT_FIRST = 40
"""Opening a stream may take longer."""
ASK_TICKS = 4
"""Ticks without an item after which a worker is asked for signs of life. One whose event loop is
late gives them: it is busy, and its requests continue in a moment. One that is stopped or gone
gives none."""
BUSY_TICKS = 120
"""Ticks that a busy worker is waited for: after half a minute clients do better elsewhere."""


class Silence:
    """Counts ticks without an item, of one attach stream.

    Args:
        pulse: reads the worker's last sign of life, None where there was none; may raise, where
            that cannot be found out.
    """

    def __init__(self, pulse: Callable[[], Awaitable[bytes | None]]) -> None:
        self._pulse = pulse
        self._num_ticks = 0
        """Ticks since the last item."""
        self._num_lifeless = 0
        """Ticks since the last item or sign of life."""
        self._last: bytes | None = None
        """Sign of life."""
        self._has_last = False
        """Whether a sign of life that differs from the last is a new one."""
        self._question: asyncio.Task[bytes | None] | None = None

    def received(self) -> None:
        """An item has come."""
        self._num_ticks = self._num_lifeless = 0

    def tick(self, *, is_attached: bool) -> str | None:
        """Time has passed; why the worker counts as lost, if it does."""
        if not self._num_ticks:
            self.close()
            self._has_last = False  # there may have been signs since that nobody has read
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
            return f"busy with something else for {BUSY_TICKS * TICK_S:.0f} s"
        return None

    def close(self) -> None:
        """Asks no more."""
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
    return f"silent for {num_ticks * TICK_S:.0f} s"
