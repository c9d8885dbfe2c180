"""Thousands of clients that disconnect at random moments; their requests must be aborted."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import urlsplit

import uvloop

from cluster.bench.report import Check, Result, at_most, checks_json, exactly, note
from cluster.launch import LocalFleet
from tests.campaigns.chaos.campaign import reference
from tests.campaigns.chaos.client import Outcome
from tests.campaigns.chaos.fleet import FleetWatch, serve_config
from tests.campaigns.chaos.load import answers_of
from tests.campaigns.chaos.options import ChaosOptions
from tests.campaigns.chaos.planned_requests import MODEL, list_requests
from tests.campaigns.chaos.processes import memory
from tests.campaigns.chaos.scrape import scrape
from tests.campaigns.chaos.tally import tally
from tests.campaigns.chaos.verdict import MOST_GROWTH, memory_growth

FREE_S: Final = 1.0
"""Seconds after the last disconnect within which all requests must end and release their pages."""
_LOOK_S = 60.0
_AT_ONCE = 48
_SETTLE = 0.2
"""Fraction of the clients that connect before the first memory sample, because buffers grow with
concurrency."""
_AGAIN_S = 1.0
"""Seconds after which an empty fleet must still be empty."""
Moment = Literal["within-request", "at-once", "before-headers", "within-answer"]
_MOMENTS: tuple[Moment, ...] = ("within-request", "at-once", "before-headers", "within-answer")
_WEIGHTS = (1, 1, 2, 4)
_RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Leave:
    """A request, and the moment at which its client disconnects."""

    payload: bytes
    """Head and body of the HTTP request."""
    moment: Moment
    after_s: float
    """Seconds after the request was sent, for before-headers."""
    num_reads: int
    """Number of reads before the client disconnects, for within-answer."""
    resets: bool
    """Whether the client resets the connection (RST) instead of closing it (FIN)."""


def plan(count: int, host: str, seed: int) -> Iterator[Leave]:
    """`count` clients, each with a unique prompt."""
    chance = random.Random(seed)
    for number in range(count):
        body = {
            "model": MODEL,
            "prompt": f"{number}: going away " + "by the ferry " * chance.randrange(40),
            "max_tokens": 1000,
            "ignore_eos": True,
            "n": chance.randint(1, 4),
            "seed": number,
            "temperature": 1.0,
            "stream": chance.random() < 0.8,
        }
        octets = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        )
        head += f"Content-Length: {len(octets)}\r\n\r\n"
        (moment,) = chance.choices(_MOMENTS, _WEIGHTS)
        if moment == "within-answer" and not body["stream"]:
            moment = "before-headers"
        yield Leave(
            payload=head.encode() + octets,
            moment=moment,
            after_s=chance.uniform(0.0, 0.1),
            num_reads=1 + int(chance.expovariate(0.2)),
            resets=chance.random() < 0.5,
        )


class CancelStorm:
    """Clients that connect and disconnect, a few dozen concurrently."""

    def __init__(self, base_url: str) -> None:
        address = urlsplit(base_url)
        assert address.hostname is not None
        self._address = (address.hostname, address.port)
        self.moments: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        """Number of responses that had started, by status."""

    def run(self, leaves: Iterator[Leave]) -> None:
        """Runs all clients; returns when the last one has left."""
        uvloop.run(self.come_and_go(leaves))

    async def come_and_go(self, leaves: Iterator[Leave]) -> None:
        """Runs all clients on the current event loop."""
        async with asyncio.TaskGroup() as group:
            for _ in range(_AT_ONCE):
                group.create_task(self._visit(leaves))

    async def _visit(self, leaves: Iterator[Leave]) -> None:
        for leave in leaves:
            self.moments[f"{leave.moment} {'RST' if leave.resets else 'FIN'}"] += 1
            reader, writer = await asyncio.open_connection(*self._address)
            try:
                await self._go(leave, reader, writer)
            except OSError:  # the server closed it first
                self.statuses["connection ended"] += 1
            finally:
                _end(writer, resets=leave.resets)

    async def _go(
        self, leave: Leave, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if leave.moment == "within-request":
            writer.write(leave.payload[: len(leave.payload) * 3 // 4])
            await writer.drain()
            return
        writer.write(leave.payload)
        await writer.drain()
        if leave.moment == "before-headers":
            await asyncio.sleep(leave.after_s)
        elif leave.moment == "within-answer":
            begin = await reader.read(1 << 16)
            self.statuses[begin[9:12].decode(errors="replace")] += 1
            for _ in range(leave.num_reads):
                if not await reader.read(1 << 16):
                    break


def _end(writer: asyncio.StreamWriter, *, resets: bool) -> None:
    if resets:
        connection: socket.socket = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        writer.transport.abort()
    else:
        writer.close()


def run_cancels(options: ChaosOptions) -> Result:
    """Starts a fleet, runs the clients, and checks that the fleet is empty afterwards."""
    config = serve_config(options)
    requests = list_requests(options.output_len, diffusion=bool(options.diffusion_model))
    with LocalFleet(config, report=note) as fleet:
        right = reference(fleet.base_url, requests, options.num_streams)
        watch = FleetWatch(fleet.base_url, config)
        leaves = plan(options.cancels, urlsplit(fleet.base_url).netloc, options.seed)
        began = time.monotonic()
        storm = CancelStorm(fleet.base_url)
        storm.run(itertools.islice(leaves, round(_SETTLE * options.cancels)))
        before = memory(watch.processes())
        storm.run(leaves)
        ended = time.monotonic()
        free_s, left_over = _wait_free(watch, ended)
        note(f"{options.cancels} clients left in {ended - began:.1f} s")
        after = memory(watch.processes())
        outcomes = answers_of(fleet.base_url, requests, options.num_streams)
        problem = watch.wait_whole(_LOOK_S)
    counts = tally(outcomes, (), right)
    growth = memory_growth(before, after)
    checks = judge_cancels(free_s, left_over, storm.statuses, outcomes, problem)
    checks += [
        exactly("wrong_afterwards", len(counts.wrong), "requests", 0),
        *(
            at_most(f"{part}_memory_growth", value, "share", MOST_GROWTH)
            for part, value in growth.items()
        ),
    ]
    return {
        "cancels": options.cancels,
        "duration_s": ended - began,
        "free_s": free_s,
        "moments": dict(storm.moments),
        "statuses": dict(storm.statuses),
        "left_over": left_over,
        "first_wrong": (counts.wrong + counts.failed)[:5],
        "broken": [check.name for check in checks if not check.holds],
        "checks": checks_json(checks),
    }


def judge_cancels(
    free_s: float,
    left_over: dict[str, float],
    statuses: Counter[str],
    outcomes: list[Outcome],
    problem: str | None,
) -> list[Check]:
    """Checks of a run.

    Args:
        free_s: seconds from the last disconnect until no request ran, waited or held pages.
        left_over: load that remained.
        statuses: number of responses that had started, by status.
        outcomes: outcomes of complete requests sent afterwards.
        problem: what is missing in the fleet; None if it is complete.
    """
    others = sum(number for status, number in statuses.items() if status != "200")
    return [
        at_most("free_after", free_s, "s", FREE_S),
        exactly("left_over", len(left_over), "gauges", 0),
        exactly("not_answered_200", others, "requests", 0),
        exactly("failed_afterwards", sum(o.end != "whole" for o in outcomes), "requests", 0),
        exactly("fleet_problems", int(problem is not None), "problems", 0),
    ]


def _wait_free(watch: FleetWatch, ended: float) -> tuple[float, dict[str, float]]:
    """Seconds from the last disconnect until the fleet stayed empty, and the remaining load if it
    did not."""
    empty_since: float | None = None
    while True:
        metrics = scrape(watch.base_url)
        now = time.monotonic()
        left = {"no_answer": 1.0} if metrics is None else metrics.left_over
        if left:
            empty_since = None
        elif empty_since is None:
            empty_since = now
        if empty_since is not None and now - empty_since >= _AGAIN_S:
            return empty_since - ended, {}
        if now - ended > _LOOK_S:
            return now - ended, left
        time.sleep(0.02)
