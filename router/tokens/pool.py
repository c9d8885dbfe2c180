"""Threads for work on long bodies and prompts, which all requests of a gateway share fairly."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from router.errors import overloaded

T = TypeVar("T")

LONG = 1 << 18
"""Characters above which work is long: a tenth of a second of a tokenizer."""
SMALL_BODY = 1 << 20
"""Bytes that are decoded and checked on the event loop, in 30 ms at most."""
MAX_WAITING = 1 << 27
"""Characters that may wait for a thread, half of them of one owner: four bodies of the largest
size, most of a minute's work of a thread. Beyond that, clients had better come again."""
RATE = 2_500_000
"""Characters per second and thread: a prompt of 33 MB took a tokenizer 13 s."""
LEAST = 1024
"""Cost that any work counts at least, so that the number of small ones is bounded as well."""


@dataclass(order=True, slots=True)
class _Waiting:
    start: float
    """Start tag, in virtual time."""
    order: int
    size: int = field(compare=False)
    owner: str = field(compare=False)
    is_long: bool = field(compare=False)
    go: asyncio.Future[None] = field(compare=False)


class WorkPool:
    """Runs work in threads, that of the least served owner first.

    Long work leaves one thread free, so that short work never waits for it. Within each of the two
    the queue is fair by start times (Goyal, Vin and Cheng 1996), as if owners took turns character
    by character; an owner's own work is done in its order. Lives on one event loop.

    Args:
        num_threads: at least 2.
    """

    def __init__(self, num_threads: int) -> None:
        assert num_threads >= 2, "one thread is kept for short work"
        self._num_threads = num_threads
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="tokens")
        self._running = {False: 0, True: 0}
        """Works under way, short and long."""
        self._queues: dict[bool, list[_Waiting]] = {False: [], True: []}
        """Heaps."""
        self._order = itertools.count()
        self._clock = 0.0
        """Virtual time: the start tag of the work that was begun last."""
        self._ends: dict[str, float] = {}
        """Finish tag of each owner's last work, of those that wait."""
        self._held: dict[str, int] = {}
        """Characters that wait, by owner."""

    async def run(self, work: Callable[[], T], *, size: int, owner: str = "") -> T:
        """The result of `work`, done in a thread.

        Args:
            work: what to do.
            size: of it, in characters or tokens.
            owner: whose it is.

        Raises:
            ApiError: 429 where too much is waiting already.
        """
        loop = asyncio.get_running_loop()
        size = max(size, LEAST)
        self._refuse_more(size, owner)
        start = max(self._clock, self._ends.get(owner, 0.0))
        waiting = _Waiting(start, next(self._order), size, owner, size > LONG, loop.create_future())
        self._ends[owner] = start + size
        self._held[owner] = self._held.get(owner, 0) + size
        heapq.heappush(self._queues[waiting.is_long], waiting)
        self._next()
        try:
            await waiting.go
        except asyncio.CancelledError:
            if waiting.go.done() and not waiting.go.cancelled():
                self._done(waiting.is_long)  # it was begun as its client left
            raise
        running = self._executor.submit(work)

        def ended(_: Future[T]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._done, waiting.is_long)

        # Of the thread, not of the client, who may leave before.
        running.add_done_callback(ended)
        return await asyncio.wrap_future(running)

    async def run_if_large(self, work: Callable[[], T], *, size: int, owner: str = "") -> T:
        """The result of `work` on a body of `size` bytes: at once where that is small.

        Raises:
            ApiError: 429 where too much is waiting already.
        """
        return work() if size <= SMALL_BODY else await self.run(work, size=size, owner=owner)

    def close(self) -> None:
        """Begins nothing more."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _refuse_more(self, size: int, owner: str) -> None:
        held = sum(self._held.values())
        if held + size <= MAX_WAITING and self._held.get(owner, 0) + size <= MAX_WAITING // 2:
            return
        raise overloaded(
            "too many long prompts are waiting to be tokenized: try again later",
            math.ceil(held / (self._num_threads - 1) / RATE),
        )

    def _next(self) -> None:
        """Begins as much work as there are threads for."""
        for is_long in (False, True):
            queue = self._queues[is_long]
            while queue and sum(self._running.values()) < self._num_threads:
                if is_long and self._running[True] >= self._num_threads - 1:
                    break
                self._begin(heapq.heappop(queue))

    def _begin(self, waiting: _Waiting) -> None:
        owner = waiting.owner
        self._held[owner] -= waiting.size
        if not self._held[owner]:
            del self._held[owner], self._ends[owner]
        if waiting.go.done():
            return  # its client has left
        self._clock = max(self._clock, waiting.start)
        self._running[waiting.is_long] += 1
        waiting.go.set_result(None)

    def _done(self, is_long: bool) -> None:
        self._running[is_long] -= 1
        self._next()
