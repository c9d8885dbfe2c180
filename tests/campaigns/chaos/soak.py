"""Soak test: an hour of steady load, some of it invalid, without loss of throughput or memory
growth."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import uvloop

from cluster.bench.report import Check, Result, at_least, checks_json, exactly, note
from cluster.bench.stats import percentile
from cluster.launch import LocalFleet
from tests.campaigns.chaos.campaign import reference
from tests.campaigns.chaos.client import Client, Outcome
from tests.campaigns.chaos.fleet import KV_CACHE_TOKENS, FleetWatch, serve_config
from tests.campaigns.chaos.hostile import hostile_requests
from tests.campaigns.chaos.load import ChaosLoad, answers_of
from tests.campaigns.chaos.options import ChaosOptions
from tests.campaigns.chaos.planned_requests import PlannedRequest, filling_request, list_requests
from tests.campaigns.chaos.slopes import Slope, SlopeWatch, as_rows
from tests.campaigns.chaos.tally import tally

LEAST_KEPT: Final = 0.98
"""Minimum throughput of the last minutes relative to the first ones."""
_WINDOW_S = 600.0
_MINUTE_S = 60.0
_FEWEST_MINUTES = 30
"""Minimum length of a soak test in minutes; shorter tests use shorter windows."""
_SAMPLES_PER_MINUTE = 12
_CALIBRATION_S = 60.0
_MEETINGS = 4
"""Expected number of requests per kind and process; one process in e^4 = 55 gets none."""
_BUSY = 2
"""Number of clients relative to `num_streams` while capacity is measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """A request and its send time."""

    at_s: float
    request: PlannedRequest
    is_hostile: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrived:
    """An arrival and its outcome."""

    arrival: Arrival
    outcome: Outcome

    @property
    def num_tokens(self) -> int:
        """Number of tokens of its answer."""
        return self.outcome.answer.completion_tokens or 0


def arrivals(
    requests: Sequence[PlannedRequest],
    hostile: Sequence[PlannedRequest],
    rate: float,
    options: ChaosOptions,
) -> Iterator[Arrival]:
    """Requests at a steady rate: one per time slot, at a random time within the slot. With Poisson
    arrivals, two windows of ten minutes would differ by more than the effect to be measured."""
    chance = random.Random(options.seed)
    good, bad = itertools.cycle(requests), itertools.cycle(hostile)
    for number in range(int(rate * options.soak_s)):
        is_hostile = bool(hostile) and chance.random() < options.hostile_share
        at_s = (number + chance.random()) / rate
        yield Arrival(at_s=at_s, request=next(bad if is_hostile else good), is_hostile=is_hostile)


async def send_all(base_url: str, coming: Iterator[Arrival]) -> list[Arrived]:
    """Sends each request at its time, whether or not earlier ones have finished."""
    found: list[Arrived] = []
    idle: list[Client] = []
    clients: list[Client] = []
    began = time.monotonic()

    async def send(arrival: Arrival) -> None:
        client = idle.pop() if idle else await Client(base_url).__aenter__()
        if client not in clients:
            clients.append(client)
        found.append(Arrived(arrival=arrival, outcome=await client.send(arrival.request)))
        idle.append(client)

    async with asyncio.TaskGroup() as group:
        for arrival in coming:
            await asyncio.sleep(max(0.0, began + arrival.at_s - time.monotonic()))
            group.create_task(send(arrival))
    for client in clients:
        await client.__aexit__()
    return found


def run_soak(options: ChaosOptions) -> Result:
    """Starts a fleet, measures its capacity, and serves a fraction of it for a long time."""
    config = serve_config(options)
    requests = list_requests(options.output_len, diffusion=bool(options.diffusion_model))
    window_s = min(_WINDOW_S, options.soak_s / 6.0)
    with LocalFleet(config, report=note) as fleet:
        right = reference(fleet.base_url, requests, options.num_streams)
        fill_caches(fleet.base_url, options)
        meet_all_kinds(fleet.base_url, requests, options)
        capacity = _capacity(fleet.base_url, requests, options)
        rate = options.soak_load * capacity
        note(f"capacity {capacity:.2f} requests/s; offering {rate:.2f}")
        watch = FleetWatch(fleet.base_url, config)
        coming = arrivals(requests, hostile_requests(), rate, options)
        minute_s = min(_MINUTE_S, options.soak_s / _FEWEST_MINUTES)
        with SlopeWatch(watch.processes(), minute_s / _SAMPLES_PER_MINUTE) as memory:
            began = time.monotonic()
            arrived = uvloop.run(send_all(fleet.base_url, coming))
        slopes = memory.slopes(began + window_s, minute_s)
        num_gone = memory.gone
    good = [one.outcome for one in arrived if not one.arrival.is_hostile]
    counts = tally(good, (), right)
    first, last = served_shares(arrived, began, options.soak_s, window_s)
    refused = Counter(_told(one.outcome) for one in arrived if one.arrival.is_hostile)
    bad = [f"{kind}: {status}" for (kind, status) in refused if not is_refusal(status)]
    checks = judge_soak(first, last, slopes, bad, num_gone)
    checks += [
        exactly("failed", len(counts.failed), "requests", 0),
        exactly("wrong", len(counts.wrong), "requests", 0),
    ]
    latencies = [one.ended - one.sent for one in good]
    return {
        "capacity_rps": capacity,
        "offered_rps": rate,
        "sent": counts.sent,
        "completed": counts.completed,
        "failed": len(counts.failed),
        "wrong": len(counts.wrong),
        "retried": dict(counts.retried),
        "hostile": sum(refused.values()),
        "latency_p50_s": percentile(latencies, 50.0),
        "latency_p99_s": percentile(latencies, 99.0),
        "served_share_first": first,
        "served_share_last": last,
        "memory": {"rows": as_rows(slopes)},
        "not_refused": bad,
        "first_failures": (counts.failed + counts.wrong)[:10],
        "broken": [check.name for check in checks if not check.holds],
        "checks": checks_json(checks),
    }


def fill_caches(base_url: str, options: ChaosOptions) -> None:
    """Makes every worker write its entire KV cache about twice. On CPU, memory of a page is
    allocated on first write, which would look like a leak for an hour.

    Raises:
        RuntimeError: a request failed.
    """
    missing = 2 * options.num_workers * KV_CACHE_TOKENS
    numbers = itertools.count()
    while missing > 0:
        requests = [
            filling_request(number) for number in itertools.islice(numbers, options.num_streams)
        ]
        answers = reference(base_url, requests, options.num_streams)
        missing -= sum(answer.prompt_tokens or 0 for answer in answers.values())


def meet_all_kinds(
    base_url: str, requests: Sequence[PlannedRequest], options: ChaosOptions
) -> None:
    """Sends each kind of request, including invalid ones, until every process has probably had
    each. In an hour there is about one invalid request of a kind, so each would be the first of its
    kind in some process, and first-time allocations would look like growth."""
    times = _MEETINGS * max(options.num_workers, options.num_gateways)
    answers_of(base_url, [*requests, *hostile_requests()] * times, options.num_streams)


def _capacity(base_url: str, requests: Sequence[PlannedRequest], options: ChaosOptions) -> float:
    """Requests per second that closed-loop clients achieve."""
    seconds = min(_CALIBRATION_S, options.soak_s / 4.0)
    clients = ChaosLoad(base_url, itertools.cycle(requests), _BUSY * options.num_streams)
    began = time.monotonic()
    with clients as load:
        time.sleep(seconds)
        outcomes = load.stop()
    # Answers after that do not count: clients become idle one after another.
    ended = [one.ended - began for one in outcomes if one.end == "whole"]
    in_time = [at for at in ended if at <= seconds]
    if not in_time:
        raise RuntimeError("no request was answered while capacity was measured")
    return len(in_time) / seconds


def served_shares(
    arrived: Sequence[Arrived], began: float, duration_s: float, window_s: float
) -> tuple[float, float]:
    """Tokens received in the first and in the last window, as fractions of the requested tokens.
    The first window starts after half a window, when the fleet is full."""
    begins = (began + 0.5 * window_s, began + duration_s - window_s)
    first, last = (_share_served(arrived, began, begin, begin + window_s) for begin in begins)
    return first, last


def _share_served(arrived: Sequence[Arrived], began: float, begin: float, end: float) -> float:
    good = [one for one in arrived if not one.arrival.is_hostile]
    num_requested = sum(one.num_tokens for one in good if begin <= began + one.arrival.at_s < end)
    came = sum(
        one.num_tokens
        for one in good
        if begin <= one.outcome.ended < end and one.outcome.end == "whole"
    )
    return came / num_requested if num_requested else 0.0


def judge_soak(
    first: float,
    last: float,
    slopes: Sequence[Slope],
    not_refused: Sequence[str],
    num_gone: int,
) -> list[Check]:
    """Checks of a run.

    Args:
        first: fraction of the requested tokens that was received in the first minutes.
        last: the same for the last minutes.
        slopes: memory growth of the processes.
        not_refused: invalid bodies that were accepted, or that caused a server error.
        num_gone: number of processes that have ended.
    """
    by_part: dict[str, list[bool]] = {}
    for slope in slopes:
        by_part.setdefault(slope.part, []).append(slope.climbs)
    return [
        at_least("last_over_first_minutes", last / first if first else 0.0, "x", LEAST_KEPT),
        at_least("served_share_last", last, "share", LEAST_KEPT),
        at_least("measured_processes", len(slopes), "processes", 1),
        exactly("ended_processes", num_gone, "processes", 0),
        exactly("hostile_not_refused", len(not_refused), "kinds", 0),
        *(
            exactly(f"{part}_memory_climbs", sum(climbs), "processes", 0)
            for part, climbs in by_part.items()
        ),
    ]


def is_refusal(status: int) -> bool:
    """Whether a body was rejected with a client error."""
    return 400 <= status < 500


def _told(outcome: Outcome) -> tuple[str, int]:
    return outcome.request.kind, outcome.status
