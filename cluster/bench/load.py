"""Load generator: sends requests at their arrival times, with a limit on concurrent ones, from one
process or several."""

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
"""Output tokens per second per client process, which takes about a quarter of a core for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Requests of one client process, and the endpoint that they are sent to."""

    url: str
    headers: dict[str, str]
    requests: tuple[Request, ...]
    max_concurrency: int | None
    """Most concurrent requests; None for no limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadResult:
    """Records of all requests in their order, with duration and cost of the client."""

    records: list[Record]
    start_s: float
    """Start of the load in seconds, on the clock of the records."""
    duration_s: float
    """Seconds from the start, which precedes the first arrival, to the end of the last request."""
    client_cpu_s: float
    """CPU seconds of all client processes."""
    num_processes: int
    """Number of client processes."""


def choose_processes(
    num_requests: int, output_len: int, max_concurrency: int | None, rate: float
) -> int:
    """Number of client processes that the offered load needs, at most one per core.

    Args:
        num_requests: number of requests.
        output_len: most tokens of a completion.
        max_concurrency: most concurrent requests; None for no limit.
        rate: requests per second.
    """
    streams = min(num_requests, max_concurrency or num_requests)
    needed = math.ceil(streams / _STREAMS_PER_PROCESS)
    if math.isfinite(rate):
        needed = max(needed, math.ceil(rate * output_len / _TOKENS_PER_PROCESS))
    return max(1, min(needed, os.cpu_count() or 1, streams))


def run_load(load: Load, num_processes: int) -> LoadResult:
    """Runs a load to its end; with several processes by `split_load`, started at the same time."""
    num_processes = max(1, min(num_processes, len(load.requests), load.max_concurrency or 10**9))
    if num_processes == 1:
        freeze_gc()  # a pause of the client would be measured as latency of the server
        start = time.perf_counter()
        return join_parts([run_part(load, start)], start)
    return join_parts(*_run_processes(split_load(load, num_processes)))


def join_parts(parts: Sequence[tuple[list[Record], float]], start: float) -> LoadResult:
    """Result of clients that started at `start`, in seconds on the clock of their records."""
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
    """Splits a load: each of `count` clients gets every count-th request and an equal share of the
    concurrency.

    Raises:
        ValueError: requests wait for each other, which they cannot do across clients.
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
    """Runs a load in each of several processes; records and CPU seconds of each, and the start."""
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
    """Runs a load in this process, see `drive`; returns records and CPU seconds."""
    cpu = time.process_time()
    records = uvloop.run(drive(load, start))
    return records, time.process_time() - cpu


async def drive(
    load: Load, start: float, on_record: Callable[[Record], None] | None = None
) -> list[Record]:
    """Sends a load from this event loop; returns the records in the order of the requests.

    Args:
        load: requests in the order of their arrivals.
        start: start of the load on `time.perf_counter`'s clock.
        on_record: called with the record of each request as it ends.
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
