"""Workers that are said to be there and have not been heard of yet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

ATTACH_S = 5.0
"""For which a request waits for one; to attach to a worker takes a tenth of a second."""


class Newcomers:
    """In a rolling update the last worker may leave in the moment in which the next one comes."""

    def __init__(self) -> None:
        self._ids: dict[str, None] = {}
        self._changed = asyncio.Event()

    def expect(self, worker_id: str) -> None:
        """A worker has joined the set: a stream to it is being opened."""
        self._ids[worker_id] = None

    def settle(self, worker_id: str) -> None:
        """It has told how it stands, or it has left. Nothing happens a second time."""
        if self._ids.pop(worker_id, worker_id) is None:
            self._changed.set()
            self._changed.clear()

    async def wait(self, is_ready: Callable[[], bool]) -> bool:
        """Waits for one of them, if any; `is_ready` is then asked, and its answer returned."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ATTACH_S):
                while self._ids and not is_ready():
                    await self._changed.wait()
        return is_ready()
