"""Load generator: sends requests at their arrival times from one or more processes, with a limit on
concurrency."""

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
"""Output tokens per second that one client process handles with about a quarter of a core."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Requests to send to one endpoint; `split_load` splits them between client processes."""

    url: str
    headers: dict[str, str]
    requests: tuple[Request, ...]
    max_concurrency: int | None
    """Maximum number of concurrent requests; None for no limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadResult:
    """Records of all requests in order, with duration and CPU time of the client."""

    records: list[Record]
    start_s: float
    """Start of the load in seconds, by the clock of the records."""
    duration_s: float
    """Seconds from the start, before the first arrival, to the end of the last request."""
    client_cpu_s: float
    """CPU seconds of all client processes."""
    num_processes: int
    """Number of client processes."""


def choose_processes(
    num_requests: int, output_len: int, max_concurrency: int | None, rate: float
) -> int:
    """Number of client processes needed for the load, at most one per core.

    Args:
        num_requests: number of requests.
        output_len: maximum number of tokens of a completion.
        max_concurrency: maximum number of concurrent requests; None for no limit.
        rate: requests per second.
    """
    streams = min(num_requests, max_concurrency or num_requests)
    needed = math.ceil(streams / _STREAMS_PER_PROCESS)
    if math.isfinite(rate):
        needed = max(needed, math.ceil(rate * output_len / _TOKENS_PER_PROCESS))
    return max(1, min(needed, os.cpu_count() or 1, streams))


def run_load(load: Load, num_processes: int) -> LoadResult:
    """Runs a load to completion, split by `split_load` between processes that start
    simultaneously."""
    num_processes = max(1, min(num_processes, len(load.requests), load.max_concurrency or 10**9))
    if num_processes == 1:
        freeze_gc()  # pauses of the client would count as latency of the server
        start = time.perf_counter()
        return join_parts([run_part(load, start)], start)
    return join_parts(*_run_processes(split_load(load, num_processes)))


def join_parts(parts: Sequence[tuple[list[Record], float]], start: float) -> LoadResult:
    """Combines the results of clients that started at `start`, in seconds by the clock of their
    records."""
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
    """Splits a load: each of `count` clients gets every `count`-th request and an equal share of
    the concurrency.

    Raises:
        ValueError: requests depend on each other, which is not supported across clients.
    """
    if any(request.after is not None for request in load.requests):
        raise ValueError("requests that depend on each other cannot be split between clients")
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
    """Runs each load in a separate process; returns the records and CPU seconds of each, and the
    start time."""
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
        raise RuntimeError("a load client process failed; see its error above") from error
    finally:
        for child in children:
            child.join(timeout=10)


def _child(load: Load, pipe: Connection) -> None:
    freeze_gc()
    pipe.send("ready")
    pipe.send(run_part(load, pipe.recv()))


def run_part(load: Load, start: float) -> tuple[list[Record], float]:
    """Runs a load in this process (see `drive`); returns records and CPU seconds."""
    cpu = time.process_time()
    records = uvloop.run(drive(load, start))
    return records, time.process_time() - cpu


async def drive(
    load: Load, start: float, on_record: Callable[[Record], None] | None = None
) -> list[Record]:
    """Sends a load from this event loop; returns records in the order of requests.

    Args:
        load: requests in the order of their arrivals.
        start: start of the load by `time.perf_counter`.
        on_record: called with the record of each finished request.
    """
    gate = asyncio.Semaphore(load.max_concurrency or max(1, len(load.requests)))
    ended = {r.after: asyncio.Event() for r in load.requests if r.after is not None}
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
