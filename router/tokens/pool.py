"""WorkPool: threads for long bodies and prompts, shared fairly by API keys."""

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
"""Size in characters above which work counts as long; tokenizing this many takes 0.1 s."""
SMALL_BODY = 1 << 18
"""Maximum size in bytes of a body decoded and validated on the event loop: at most 40 ms of CPU
time for any body of tests/router/test_linear_time.py on two busy cores; 1 MiB took up to 120 ms."""
MAX_WAITING = 1 << 27
"""Maximum total size in characters of the work waiting for a thread: four bodies of the largest
size, or 54 s of one thread. Each owner may have half of it."""
RATE = 2_500_000
"""Number of characters that a thread tokenizes per second: a prompt of 33 MB took 13 s."""
LEAST = 1024
"""Minimum size in characters that a task counts as, which also bounds the number of waiting tasks.
"""


@dataclass(order=True, slots=True)
class _Waiting:
    """Work waiting for a thread."""

    start: float
    """Start tag, in virtual time."""
    order: int
    size: int = field(compare=False)
    owner: str = field(compare=False)
    is_long: bool = field(compare=False)
    go: asyncio.Future[None] = field(compare=False)


class WorkPool:
    """Thread pool with start-time fair queueing between owners (Goyal, Vin and Cheng 1996).

    There is a queue for short work and one for long work; long work always leaves one thread for
    short work. Within a queue, service is shared as if owners took turns character by character; an
    owner's work is run in order. Must be used on one event loop.

    Args:
        num_threads: number of threads, at least 2.
    """

    def __init__(self, num_threads: int) -> None:
        assert num_threads >= 2, "one thread is reserved for short work"
        self._num_threads = num_threads
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="tokens")
        self._running = {False: 0, True: 0}
        """Number of running tasks, by whether they are long."""
        self._queues: dict[bool, list[_Waiting]] = {False: [], True: []}
        """Heaps of waiting work, by whether it is long."""
        self._order = itertools.count()
        self._clock = 0.0
        """Virtual time: the greatest start tag of started work."""
        self._ends: dict[str, float] = {}
        """Finish tag of the last waiting work, by owner."""
        self._held: dict[str, int] = {}
        """Characters of waiting work, by owner."""

    async def run(self, work: Callable[[], T], *, size: int, owner: str = "") -> T:
        """Runs `work` in a thread, and returns its result.

        Args:
            size: size of the work in characters or tokens.
            owner: name of the API key; empty if there is none.

        Raises:
            ApiError: 429 if too much work is waiting.
        """
        loop = asyncio.get_running_loop()
        size = max(size, LEAST)
        self._check_room(size, owner)
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
                self._done(waiting.is_long)  # its client left after it got a thread
            raise
        running = self._executor.submit(work)

        def ended(_: Future[T]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._done, waiting.is_long)

        # When the thread is free, not when the client stops waiting.
        running.add_done_callback(ended)
        return await asyncio.wrap_future(running)

    async def run_if_large(self, work: Callable[[], T], *, size: int, owner: str = "") -> T:
        """Runs `work` on a body of `size` bytes in a thread, or inline if it is small.

        Raises:
            ApiError: 429 if too much work is waiting.
        """
        return work() if size <= SMALL_BODY else await self.run(work, size=size, owner=owner)

    def close(self) -> None:
        """Stops starting work."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _check_room(self, size: int, owner: str) -> None:
        held = sum(self._held.values())
        if held + size <= MAX_WAITING and self._held.get(owner, 0) + size <= MAX_WAITING // 2:
            return
        raise overloaded(
            "too many long prompts are waiting to be tokenized: try again later",
            math.ceil(held / (self._num_threads - 1) / RATE),
        )

    def _next(self) -> None:
        """Starts waiting work for which threads are free."""
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
            return  # its client has disconnected
        self._clock = max(self._clock, waiting.start)
        self._running[waiting.is_long] += 1
        waiting.go.set_result(None)

    def _done(self, is_long: bool) -> None:
        self._running[is_long] -= 1
        self._next()
