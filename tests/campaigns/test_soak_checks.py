"""Disconnecting clients, soak tests, and fits of memory growth: their checks."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest

from tests.campaigns.chaos.cancels import CancelStorm, Leave, judge_cancels, plan
from tests.campaigns.chaos.client import Outcome
from tests.campaigns.chaos.hostile import hostile_requests
from tests.campaigns.chaos.kinds import Part
from tests.campaigns.chaos.options import ChaosOptions
from tests.campaigns.chaos.planned_requests import PlannedRequest, list_requests
from tests.campaigns.chaos.slopes import Slope, fit_slope, minute_means
from tests.campaigns.chaos.soak import (
    Arrival,
    Arrived,
    arrivals,
    is_refusal,
    judge_soak,
    served_shares,
)

REQUEST = PlannedRequest(index=0, kind="greedy", path="/v1/completions", body=b"{}", stream=True)


def test_clients_leave_at_all_moments_and_in_both_ways() -> None:
    leaves = list(plan(400, "127.0.0.1:1", seed=0))
    assert leaves == list(plan(400, "127.0.0.1:1", seed=0))
    assert len({leave.payload for leave in leaves}) == 400
    ways = Counter((leave.moment, leave.resets) for leave in leaves)
    assert len(ways) == 8
    bodies = [json.loads(leave.payload.partition(b"\r\n\r\n")[2]) for leave in leaves]
    assert {body["n"] for body in bodies} == {1, 2, 3, 4}
    assert {body["stream"] for body in bodies} == {True, False}


async def test_each_client_leaves_when_it_is_to() -> None:
    requests: list[bytes] = []
    ends: list[type[BaseException] | None] = []
    pieces = b"HTTP/1.1 200 OK\r\n\r\n"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await reader.read(1 << 16)
            requests.append(request)
            if request.endswith(b"answer"):
                writer.write(pieces)
            end = await reader.read(1)
            assert end == b""
            ends.append(None)
        except ConnectionError as error:
            ends.append(type(error))
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    common: dict[str, Any] = {"after_s": 0.0, "num_reads": 0}
    leaves = [
        Leave(payload=b"0123456789ab", moment="within-request", resets=False, **common),
        Leave(payload=b"whole", moment="before-headers", resets=False, **common),
        Leave(payload=b"answer", moment="within-answer", resets=True, **common),
    ]
    storm = CancelStorm(f"http://{host}:{port}")
    await storm.come_and_go(iter(leaves))
    async with asyncio.timeout(60):
        while len(ends) < len(leaves):
            await asyncio.sleep(0.01)
    server.close()
    assert sorted(requests) == [b"012345678", b"answer", b"whole"]
    assert ends.count(ConnectionResetError) == 1
    assert storm.statuses == {"200": 1}
    assert storm.moments.total() == 3


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({}, []),
        ({"free_s": 1.5}, ["free_after"]),
        ({"left_over": {"kv_cache_usage_perc": 0.1}}, ["left_over"]),
        ({"statuses": Counter({"200": 5, "500": 1})}, ["not_answered_200"]),
        ({"problem": "1 of 2 gateways"}, ["fleet_problems"]),
        ({"outcomes": [Outcome(request=REQUEST, sent=0.0, end="error")]}, ["failed_afterwards"]),
    ],
)
def test_what_clients_leave_behind_is_named(changed: dict[str, Any], names: list[str]) -> None:
    case: dict[str, Any] = {
        "free_s": 0.4,
        "left_over": {},
        "statuses": Counter({"200": 5}),
        "outcomes": [Outcome(request=REQUEST, sent=0.0, end="whole")],
        "problem": None,
    }
    checks = judge_cancels(**(case | changed))
    assert [check.name for check in checks if not check.holds] == names


def test_hostile_bodies_differ_and_a_server_error_is_no_refusal() -> None:
    planned_requests = hostile_requests()
    assert len({planned.kind for planned in planned_requests}) == len(planned_requests) >= 20
    assert max(len(planned.body) for planned in planned_requests) < 32 * 2**20
    assert [is_refusal(status) for status in (400, 413, 429, 200, 500, 0)] == [
        *[True] * 3,
        *[False] * 3,
    ]


def test_load_is_steady_and_a_little_of_it_hostile() -> None:
    options = ChaosOptions(soak_s=1000.0, hostile_share=0.05)
    coming = list(arrivals(list_requests(64), hostile_requests(), 2.0, options))
    assert len(coming) == 2000
    times = [arrival.at_s for arrival in coming]
    assert times == sorted(times)
    per_window = np.histogram(times, bins=10, range=(0.0, 1000.0))[0]
    assert set(per_window) == {200}
    assert 50 < sum(arrival.is_hostile for arrival in coming) < 150
    assert not any(a.is_hostile for a in islice(arrivals([REQUEST], (), 2.0, options), 50))


def arrived(at_s: float, took_s: float, *, end: str = "whole") -> Arrived:
    outcome = Outcome(request=REQUEST, sent=at_s, ended=at_s + took_s, end=end)  # type: ignore[arg-type]
    outcome.answer.completion_tokens = 10
    arrival = Arrival(at_s=at_s, request=REQUEST, is_hostile=False)
    return Arrived(arrival=arrival, outcome=outcome)


def test_a_fleet_that_falls_behind_serves_a_smaller_share() -> None:
    def shares(took: Callable[[int], float], end: str = "whole") -> tuple[float, float]:
        ends = ["whole"] * 950 + [end] * 50
        answers = [arrived(float(at), took(at), end=ends[at]) for at in range(1000)]
        return served_shares(answers, 0.0, 1000.0, 100.0)

    assert shares(lambda at: 2.0) == pytest.approx((1.0, 1.0))
    assert shares(lambda at: 0.2 * at) == pytest.approx((0.83, 0.83), abs=0.02)
    first, last = shares(lambda at: 0.0 if at < 500 else at - 500.0)
    assert (first, last) == pytest.approx((1.0, 0.5), abs=0.02)
    assert shares(lambda at: 2.0, end="error")[1] < 0.6
    assert served_shares([], 0.0, 1000.0, 100.0) == (0.0, 0.0)


def slope(values: list[float]) -> Slope:
    return fit_slope(Part.FRONT, 1, values, 60.0, 0.995)


def test_growing_memory_differs_from_varying_memory() -> None:
    noise = np.random.default_rng(0).normal(0.0, 0.2, 60)
    assert not slope((200.0 + noise).tolist()).climbs
    climbing = slope((200.0 + noise + np.arange(60) / 6.0).tolist())
    assert climbing.climbs
    assert climbing.slope == pytest.approx(10.0, abs=1.0)
    assert len(climbing.course) == 15
    assert not slope((200.0 - np.arange(60) / 6.0).tolist()).climbs
    assert not slope([200.0] * 60).climbs


def test_a_small_leak_is_found() -> None:
    """A leak of 2 % per hour. The confidence interval of a linear fit, widened for correlated
    minutes, would span 900 MiB/h."""
    leak = slope([430.0 + 9.0 * minute / 60.0 + 0.1 * (minute % 3) for minute in range(50)])
    assert leak.climbs
    assert leak.slope == pytest.approx(9.0, abs=0.5)


@pytest.mark.parametrize("at", range(5, 60, 5))
@pytest.mark.parametrize("size", [0.5, 50.0])
def test_one_step_is_no_climb_but_a_staircase_is(at: int, size: float) -> None:
    noise = np.random.default_rng(at).normal(0.0, 0.02, 60)
    one = np.where(np.arange(60) < at, 200.0, 200.0 + size)
    assert not slope((one + noise).tolist()).climbs
    assert slope([200.0 + 2.0 * (minute // 4) for minute in range(60)]).climbs


@pytest.mark.parametrize("every", [6, 10, 12])
def test_a_leak_may_take_large_pieces_rarely(every: int) -> None:
    """A table that doubles, or an allocator that requests arenas, grows like this."""
    noise = np.random.default_rng(every).normal(0.0, 0.02, 60)
    stairs = 200.0 + 2.0 * (np.arange(60) // every)
    assert slope((stairs + noise).tolist()).climbs


def test_what_levels_off_is_no_climb() -> None:
    minutes = np.arange(50)
    warming = 146.0 + 2.0 * (1.0 - np.exp(-minutes / 12.0)) + 0.4 * minutes / 50.0
    assert not slope(warming.tolist()).climbs
    leaking = slope((warming + 9.0 * minutes / 60.0).tolist())
    assert leaking.climbs, "a leak beside it does not level off"
    creeping = 459.4 + 0.4 * (1.0 - np.exp(-minutes / 12.0))
    for at in range(5, 50, 5):
        assert not slope((creeping + np.where(minutes < at, 0.0, 50.0)).tolist()).climbs


COURSES = {
    "front": [
        *(146.79, 146.79, 147.02, 147.35, 147.71, 147.77, 147.77),
        *(147.78, 147.78, 147.78, 147.84, 147.95, 148.03),
    ],
    "other front": [
        *(146.3, 146.45, 146.8, 147.19, 147.2, 147.34, 147.45),
        *(147.45, 147.45, 147.45, 147.45, 147.66, 148.03),
    ],
    "gateway": [
        *(169.38, 168.35, 168.38, 168.39, 168.44, 168.47, 168.48),
        *(168.96, 172.06, 172.06, 169.67, 169.68, 169.68),
    ],
    "other gateway": [
        *(164.23, 164.58, 164.91, 164.88, 164.83, 164.88, 164.89),
        *(166.04, 166.49, 166.08, 166.1, 166.1, 166.1),
    ],
    "rank": [
        *(459.41, 459.58, 459.63, 459.63, 459.68, 459.71, 459.72),
        *(459.73, 459.75, 459.78, 459.79, 459.79, 459.79),
    ],
    "haproxy": [
        *(15.74, 16.34, 16.44, 16.38, 16.3, 16.15, 16.31),
        *(17.13, 17.4, 17.53, 16.1, 16.14, 16.11),
    ],
    "step": [
        *(371.85, 371.88, 371.91, 371.92, 371.92, 371.92, 371.92),
        *(371.94, 371.98, 371.98, 371.98, 371.98, 371.98),
    ],
}
"""Memory in MiB per four minutes, from the tenth minute of an hour with 4,609 requests."""


@pytest.mark.parametrize("process", COURSES)
def test_an_hour_that_was_measured_has_no_leak_and_one_in_it_is_found(process: str) -> None:
    course = COURSES[process]
    assert not fit_slope(Part.FRONT, 1, course, 240.0, 0.995).climbs
    for mib_per_h in (2.4, 9.0):
        leak = [mib + mib_per_h * block / 15.0 for block, mib in enumerate(course)]
        assert fit_slope(Part.FRONT, 1, leak, 240.0, 0.995).climbs


def test_minutes_are_whole() -> None:
    samples = [(float(at), 10.0 if at < 60 else 20.0) for at in range(0, 130, 5)]
    assert minute_means(samples, 60.0) == [10.0, 20.0]


def test_what_an_hour_has_broken_is_named() -> None:
    flat = Slope(part="front", pid=1, course=(9.0,), slope=0.1, climbs=False)
    climbing = Slope(part="step", pid=2, course=(9.0,), slope=2.0, climbs=True)

    def broken(*case: Any) -> list[str]:
        return [check.name for check in judge_soak(*case) if not check.holds]

    assert broken(1.0, 0.99, [flat], [], 0) == []
    assert broken(1.02, 0.99, [flat], [], 0) == ["last_over_first_minutes"]
    assert broken(0.5, 0.5, [flat], [], 0) == ["served_share_last"]
    assert broken(1.0, 1.0, [flat, climbing], [], 0) == ["step_memory_climbs"]
    assert broken(1.0, 1.0, [flat], ["empty: 500"], 0) == ["hostile_not_refused"]
    assert broken(1.0, 1.0, [], [], 1) == ["measured_processes", "ended_processes"]
