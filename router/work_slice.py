"""Slices of work: splits one request's long work on the event loop into short parts."""

from __future__ import annotations

import asyncio
from typing import Final

SLICE_S: Final = 0.005
"""Seconds of work on one request before other tasks run: the interpreter's switch interval. A
request may have 2,048 completions, each of which takes 0.1 to 0.2 ms of work in total."""


class WorkSlice:
    """Measures the time that a task has worked since other tasks of the event loop could last run.

    Check `is_over` after each small part of the work; if it is, await `next`.
    """

    __slots__ = ("_clock", "_until")

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._until = self._clock() + SLICE_S

    @property
    def is_over(self) -> bool:
        """Whether the task has worked for SLICE_S."""
        return self._clock() >= self._until

    async def next(self) -> None:
        """Lets other tasks run, and begins the next slice."""
        await asyncio.sleep(0)
        self._until = self._clock() + SLICE_S
