"""Sends requests at their times, at most so many at once, from one process or several."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import uvloop

from cluster.bench.client import Record, Request, open_session, send
from worker.memory import freeze_gc

_STREAMS_PER_PROCESS = 256
_TOKENS_PER_PROCESS = 10_000
"""Output tokens per second that one client process carries on about a quarter of a core."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Requests of one client process and where they go."""

    url: str
    headers: dict[str, str]
    requests: tuple[Request, ...]
    max_concurrency: int | None
    """None sets no bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadResult:
    """Records of all requests, in their order, and what it took to get them."""

    records: list[Record]
    start_s: float
    """Start, in seconds on the clock of the records."""
    duration_s: float
    """Seconds from the start, before the first arrival's gap, to the last end."""
    client_cpu_s: float
    """CPU time of the client, all processes together."""
    num_processes: int


def choose_processes(
    num_requests: int, output_len: int, max_concurrency: int | None, rate: float
) -> int:
    """Client processes that the offered load needs, at most one per core."""
    streams = min(num_requests, max_concurrency or num_requests)
    needed = math.ceil(streams / _STREAMS_PER_PROCESS)
    if math.isfinite(rate):
        needed = max(needed, math.ceil(rate * output_len / _TOKENS_PER_PROCESS))
    return max(1, min(needed, os.cpu_count() or 1, streams))


def run_load(load: Load, num_processes: int) -> LoadResult:
    """Runs a load to its end.

    With several processes each takes every n-th request and an equal share of the concurrency,
    and all start at the same moment.
    """
    num_processes = max(1, min(num_processes, len(load.requests), load.max_concurrency or 10**9))
    if num_processes == 1:
        freeze_gc()  # a pause here would be taken for one of the server
        start = time.perf_counter()
        return join_parts([run_part(load, start)], start)
    return join_parts(*_run_processes(split_load(load, num_processes)))


def join_parts(parts: Sequence[tuple[list[Record], float]], start: float) -> LoadResult:
    """The result of several clients that began at `start` on the clock of their records."""
    records = sorted((r for part, _ in parts for r in part), key=lambda record: record.index)
    ends = [record.start + record.latency for record in records]
    return LoadResult(
        records=records,
        start_s=start,
        duration_s=max(ends) - start if records else 0.0,
        client_cpu_s=sum(cpu_s for _, cpu_s in parts),
        num_processes=len(parts),
    )


def split_load(load: Load, count: int) -> list[Load]:
    """Every n-th request and an equal share of the concurrency for each of `count` clients.

    Raises:
        ValueError: requests wait for each other, which those of another client cannot.
    """
    if any(request.after is not None for request in load.requests):
        raise ValueError("requests that wait for each other are sent by one client")
    limit = load.max_concurrency
    return [
        Load(
            url=load.url,
            headers=load.headers,
            requests=load.requests[place::count],
            max_concurrency=None if limit is None else (limit + count - 1 - place) // count,
        )
        for place in range(count)
    ]


def _run_processes(loads: Sequence[Load]) -> tuple[list[tuple[list[Record], float]], float]:
    """The records of each process, and when they began."""
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    children = []
    for load in loads:
        ours, theirs = context.Pipe()
        child = context.Process(target=_child, args=(load, theirs), daemon=True)
        child.start()
        theirs.close()
        pipes.append(ours)
        children.append(child)
    try:
        for pipe in pipes:
            pipe.recv()
        start = time.perf_counter() + 0.05
        for pipe in pipes:
            pipe.send(start)
        return [pipe.recv() for pipe in pipes], start
    except EOFError as error:
        raise RuntimeError("a load client process ended early; its error is above") from error
    finally:
        for child in children:
            child.join(timeout=10)


def _child(load: Load, pipe: Connection) -> None:
    freeze_gc()
    pipe.send("ready")
    pipe.send(run_part(load, pipe.recv()))


def run_part(load: Load, start: float) -> tuple[list[Record], float]:
    """Runs a load in this process; its records and CPU time. `start`: see `drive`."""
    cpu = time.process_time()
    records = uvloop.run(drive(load, start))
    return records, time.process_time() - cpu


async def drive(
    load: Load, start: float, on_record: Callable[[Record], None] | None = None
) -> list[Record]:
    """Sends a load from this event loop; `on_record` is told of each request as it ends.

    Args:
        load: requests in the order of their arrivals, and where they go.
        start: on `time.perf_counter`'s clock.
    """
    gate = asyncio.Semaphore(load.max_concurrency or max(1, len(load.requests)))
    ended = {one.after: asyncio.Event() for one in load.requests if one.after is not None}
    async with open_session(load.headers) as session:

        async def limited(request: Request) -> Record:
            if request.after is not None:
                await ended[request.after].wait()
                await asyncio.sleep(request.arrival_s)
            async with gate:
                record = await send(session, load.url, request)
            if request.index in ended:
                ended[request.index].set()
            if on_record is not None:
                on_record(record)
            return record

        tasks: list[asyncio.Task[Record]] = []
        for request in load.requests:
            delay = start + request.arrival_s - time.perf_counter()
            if delay > 0 and request.after is None:
                await asyncio.sleep(delay)
            tasks.append(asyncio.create_task(limited(request)))
        return list(await asyncio.gather(*tasks))
