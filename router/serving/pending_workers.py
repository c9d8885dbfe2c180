"""Workers that take the place of others, and cannot be reached yet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

ATTACH_S = 5.0
"""For which a request waits for one that is there; to attach to it takes a tenth of a second."""
MAX_WAITING = 4096
"""Requests that may wait at the same time."""


class PendingWorkers:
    """In a rolling update the last worker may leave when the next one has just come, or before.

    Args:
        load_s: for which a request waits for a worker that is yet to come where the last has left.
        on_demand: whether one is to come where there has been none, too.
    """

    def __init__(self, load_s: float, *, on_demand: bool = False) -> None:
        self._load_s = load_s
        self._expected: dict[str, None] = {}
        """Have come; a stream to them is being opened."""
        self._vacant = on_demand
        """Whether all that were there have left."""
        self._num_waiting = 0
        self._changed = asyncio.Event()

    def add(self, worker_id: str) -> None:
        """A worker has come; its first report is awaited."""
        self._expected[worker_id] = None
        self._vacant = False

    def resolved(self, worker_id: str) -> None:
        """It has reported its state, or it has left. Nothing happens a second time."""
        if self._expected.pop(worker_id, worker_id) is None:
            self._wake()

    def all_left(self) -> None:
        """The set of workers has become empty."""
        self._vacant = True

    def close(self) -> None:
        """Nobody will come."""
        self._vacant = False
        self._expected.clear()
        self._wake()

    async def wait(self, is_ready: Callable[[], bool]) -> bool:
        """Waits for one where one is to come; `is_ready` is then asked, and its answer returned."""
        if self._num_waiting < MAX_WAITING:
            self._num_waiting += 1
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._load_s if self._vacant else ATTACH_S):
                        while (self._vacant or self._expected) and not is_ready():
                            await self._changed.wait()
            finally:
                self._num_waiting -= 1
        return is_ready()

    def _wake(self) -> None:
        self._changed.set()
        self._changed.clear()
