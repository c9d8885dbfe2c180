"""`make check-hostile`: a fleet under whatever clients may send, by accident or on purpose.

1. requests: ten thousand that hypothesis draws, most of them wrong. None is answered with an error
   of the server's, all that deserve an answer get one, and all processes stay.
2. heavy: bodies at every limit, twice each, while others stream. Nobody's stream halts, and memory
   follows the body and goes back.
3. half-open: as many connections as there is room for, each with half a request.
4. slow-readers: large streams of which nothing is read.

"""

from __future__ import annotations

import asyncio
import json
import math
import resource
import socket
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from cluster.bench.report import Check, at_least, at_most, checks_json, exactly, note
from router.api.http.client_streams import StreamLimits
from tests.campaigns.checks import check_main, with_prefix
from tests.campaigns.hostile.attack import (
    BYSTANDER_GAP_MS,
    MIB,
    SMALL_GROWTH_MIB,
    run_heavy,
    warm_up,
)
from tests.campaigns.hostile.clients import (
    Found,
    Neighbour,
    each,
    judge_found,
    open_session,
    problem_of,
    problem_of_raw,
    send,
    send_raw,
)
from tests.campaigns.hostile.fleet import AttackedFleet, MemoryLog, attacked_fleet, bystanders_of
from tests.campaigns.hostile.inputs import KINDS, MAX_MODEL_LEN, Case, draw
from tests.campaigns.hostile.raw import RawCase, Target, raws

NUM_REQUESTS = 10_000
NUM_RAW = 1_000
"""Of them."""
NUM_SOCKETS = 10_000
REQUESTS_S = 1800.0
"""For all of them together; what has not been sent by then is missing in the count."""
AT_ONCE = 8
AT_ONCE_BY_KIND = {"grammars": 2}
"""As many as a worker has compiling processes: a grammar that has not been compiled in 8 s, because
others are, is a 503 that says when to come back."""
RAW_AT_ONCE = 32
HEALTH_S = 1.0
HALF_OPEN_S = 180.0
"""For all of that part: a failure alone takes so long."""
CLOSED_S = 15.0
NUM_SLOW_READERS = 8
SLOW_READERS_N = 16
"""Completions of each: as many in all as two workers run at once, 64 each on CPU."""
UNREAD_S = StreamLimits().stalled_s
"""After which a gateway ends the stream of a client that takes nothing."""
TURNS_S = 600.0
"""For all slow readers to have their turn: a failure alone takes so long."""
SETTLE_S = 60.0
"""For a fleet to serve again, and for streams to be ended: a failure alone waits so long."""
Figures = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostileOptions:
    """What is attacked, and how much."""

    seed: int = 0
    """Of all that is drawn: the same requests for the same seed."""
    scale: float = 1.0
    """Part of the requests, heavy bodies and connections, for a short trial."""
    only: tuple[str, ...] = ()
    """Part of the campaign: requests, heavy, half-open, slow-readers. May be given several times;
    all unless given."""

    bodies: str = ""
    """Of the heavy bodies those alone whose names hold this."""

    def __post_init__(self) -> None:
        if not 0.0 < self.scale <= 1.0:
            raise ValueError(f"--scale must be in (0, 1], got {self.scale}")
        unknown = [name for name in self.only if name not in PARTS]
        if unknown:
            raise ValueError(f"--only must be one of {', '.join(PARTS)}, got {unknown[0]}")

    def scaled(self, count: int) -> int:
        """At least one."""
        return max(1, math.ceil(count * self.scale))


def run_hostile(options: HostileOptions) -> Figures:
    """Starts a fleet and attacks it."""
    figures: Figures = {}
    checks: list[Check] = []
    with attacked_fleet() as fleet:
        for name, run in PARTS.items():
            if options.only and name not in options.only:
                continue
            note(f"{name} ...")
            began = time.monotonic()
            processes = fleet.remember()
            results, judged = run(fleet, options)
            results["processes"] = processes
            results["seconds"] = time.monotonic() - began
            results["deaths"], results["serves_after"] = fleet.deaths(), _serves_after(fleet)
            judged += judge_survival(results["deaths"], results["serves_after"])
            prefix = name.replace("-", "_")
            checks += with_prefix(prefix, judged)
            figures[prefix] = results
            num_failed = sum(not check.holds for check in judged)
            note(f"{name}: {results['seconds']:.0f} s, {num_failed} checks fail")
    return {"seed": options.seed, "scale": options.scale, **figures, "checks": checks_json(checks)}


def _serves_after(fleet: AttackedFleet) -> str:
    """Empty where it does, else why it does not."""
    deadline = time.monotonic() + SETTLE_S
    while (problem := fleet.serves()) is not None and time.monotonic() < deadline:
        time.sleep(0.5)
    return problem or ""


def judge_survival(deaths: Sequence[str], serves_after: str) -> list[Check]:
    """Whether the fleet is what it was."""
    return [
        exactly("processes_lost", len(deaths), "processes", 0),
        exactly("serves_after", int(not serves_after), "fleets", 1),
    ]


# ---- requests


def run_requests(fleet: AttackedFleet, options: HostileOptions) -> tuple[Figures, list[Check]]:
    """Draws them kind by kind, and sends them."""
    deadline = time.monotonic() + REQUESTS_S
    found: list[Found] = []
    sent: dict[str, int] = {}
    statuses: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for number, (kind, (share, strategy)) in enumerate(KINDS.items()):
        count = options.scaled((NUM_REQUESTS - NUM_RAW) * share // 100)
        cases = draw(strategy(fleet.model), count, options.seed + number)
        sent[kind] = asyncio.run(_send_cases(fleet, kind, cases, found, statuses, deadline))
        note(f"{kind}: {sent[kind]} sent, {len(found)} problems so far")
    target = Target(model=fleet.model, api_key=fleet.api_key)
    raw = draw(raws(target), options.scaled(NUM_RAW), options.seed)
    sent["raw"], num_wrong = asyncio.run(_send_raws(fleet, raw, found, statuses, deadline))
    figures: Figures = {
        "sent": sent,
        "statuses": {
            kind: {str(status): counts[status] for status in sorted(counts)}
            for kind, counts in statuses.items()
        },
        "problems": _told(found),
    }
    return figures, judge_requests(sum(sent.values()), options, found, num_wrong)


def judge_requests(
    num_sent: int, options: HostileOptions, found: Sequence[Found], num_wrong_neighbours: int
) -> list[Check]:
    """What was promised, against what came back."""
    return [
        at_least("sent", num_sent, "requests", options.scaled(NUM_REQUESTS)),
        *judge_found(found),
        exactly("neighbours_wrong", num_wrong_neighbours, "requests", 0),
    ]


def _told(found: Iterable[Found], most: int = 50) -> list[Figures]:
    return [
        {
            "kind": one.kind,
            "fault": one.problem.fault,
            "problem": one.problem.text,
            "request": one.request,
        }
        for one in list(found)[:most]
    ]


async def _send_cases(
    fleet: AttackedFleet,
    kind: str,
    cases: Sequence[Case],
    found: list[Found],
    statuses: defaultdict[str, Counter[int]],
    deadline: float,
) -> int:
    async with open_session(fleet.api_key) as session:

        async def work(case: Case) -> None:
            answer = await send(session, fleet.base_url, case)
            statuses[kind][answer.status] += 1
            if (problem := problem_of(answer)) is not None:
                text = f"{case.path} {case.content_type} {case.body[:1000]!r}"
                found.append(Found(kind=case.kind, problem=problem, request=text))

        at_once = AT_ONCE_BY_KIND.get(kind, AT_ONCE)
        return await each(cases, work, at_once=at_once, deadline=deadline)


async def _send_raws(
    fleet: AttackedFleet,
    cases: Sequence[RawCase],
    found: list[Found],
    statuses: defaultdict[str, Counter[int]],
    deadline: float,
) -> tuple[int, int]:
    """How many were sent; and how many of another client's answers were not its own.

    That client shares the proxy's connections: what one request leaves of another, it would get.
    """

    async def work(case: RawCase) -> None:
        answer = await send_raw(fleet.port, case)
        statuses["raw"].update(answer.statuses or (0,))
        problem = problem_of_raw(case, answer, fleet.api_key)
        if problem is not None:
            sent = b"".join(case.pieces)
            found.append(Found(kind=case.kind, problem=problem, request=f"{sent[:1000]!r}"))

    neighbour = Neighbour(fleet.base_url, fleet.model, fleet.api_key)
    asking = asyncio.create_task(neighbour.ask_on())
    num_sent = await each(cases, work, at_once=RAW_AT_ONCE, deadline=deadline)
    asking.cancel()
    await asyncio.wait([asking])
    note(f"raw: {num_sent} sent, {neighbour.num_requested} of a neighbour")
    return num_sent, neighbour.num_wrong


# ---- half-open connections


def run_half_open(fleet: AttackedFleet, options: HostileOptions) -> tuple[Figures, list[Check]]:
    """Opens them in a process of its own, which has a limit of its own."""
    limits = {
        "wanted": options.scaled(NUM_SOCKETS),
        "descriptors": resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 256,
        "haproxy_maxconn": fleet.max_connections() - 256,
    }
    command = [sys.executable, "-m", "tests.campaigns.hostile.sockets", str(fleet.port)]
    times: list[float] = []
    num_failed = 0
    began = time.monotonic()
    with subprocess.Popen([*command, str(min(limits.values()))], stdout=subprocess.PIPE) as child:
        while child.poll() is None:
            seconds = _get_health(fleet)
            times.append(seconds)
            num_failed += seconds == math.inf
            time.sleep(0.1)
            if time.monotonic() - began > HALF_OPEN_S:
                child.kill()
        assert child.stdout is not None
        lines = child.stdout.read().splitlines()
    sockets = json.loads(lines[-1]) if len(lines) > 1 else {}
    figures = {"limits": limits, "sockets": sockets, "asked": len(times), "failed": num_failed}
    return figures, judge_half_open(min(limits.values()), sockets, times)


def _get_health(fleet: AttackedFleet) -> float:
    """Seconds over a new connection; infinite where there is no good answer."""
    began = time.monotonic()
    try:
        answer = httpx.get(f"{fleet.base_url}/health", timeout=SETTLE_S, verify=False)
    except httpx.HTTPError:
        return math.inf
    return time.monotonic() - began if answer.status_code == 200 else math.inf


def judge_half_open(
    count: int, sockets: Mapping[str, float], health: Sequence[float]
) -> list[Check]:
    """Whether there was room for others, and when there was room again."""
    return [
        at_least("opened", sockets.get("opened", 0), "connections", count),
        at_least("health_asked", len(health), "requests", 10),
        at_most("longest_health", max(health, default=math.inf), "s", HEALTH_S),
        at_least("closed", sockets.get("closed", 0), "connections", count),
        at_most("longest_life", sockets.get("longest_s", math.inf), "s", CLOSED_S),
    ]


# ---- clients that do not read


def run_slow_readers(fleet: AttackedFleet, options: HostileOptions) -> tuple[Figures, list[Check]]:
    """Asks for far more than anyone's buffers hold, and takes nothing of it.

    Of a connection's unread bytes the kernel holds some, and HAProxy a buffer; the gateway has the
    rest, see `router.api.http.client_streams`.
    """
    asyncio.run(warm_up(fleet))
    body = {
        "model": fleet.model,
        "prompt": "go on",
        "n": SLOW_READERS_N,
        "logprobs": 20,
        "max_tokens": MAX_MODEL_LEN - 100,
        "ignore_eos": True,
        "stream": True,
    }
    target = Target(model=fleet.model, api_key=fleet.api_key)
    with bystanders_of(fleet) as bystanders, MemoryLog(fleet) as memory:
        time.sleep(2.0)
        since = time.monotonic()
        readers = [
            _begin_stream(fleet.port, target, json.dumps(body).encode())
            for _ in range(NUM_SLOW_READERS)
        ]
        time.sleep(UNREAD_S)
        held = memory.growth(since, time.monotonic())
        ended_s = _wait_ended(fleet, since)
        now = time.monotonic()
        figures = {
            "growth_mib": held,
            "ended_s": ended_s,
            "quiet_gap_ms": 1000 * bystanders.longest_gap(since - 1.0, since),
            "longest_gap_ms": 1000 * bystanders.longest_gap(since, now),
            "bystanders_tokens": bystanders.num_tokens(since, now),
            "bystanders_failed": bystanders.num_failed,
        }
        for reader in readers:
            reader.close()
    return figures, judge_slow_readers(figures)


def _begin_stream(port: int, target: Target, body: bytes) -> socket.socket:
    """A connection over which a request has been sent, with as small a buffer as there can be."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    connection.sendall(target.head() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    return connection


def _wait_ended(fleet: AttackedFleet, since: float) -> float:
    """Seconds from when the last reader was to be ended until workers have nothing but the
    bystanders; infinite where that does not come.

    Completions outgrow the KV cache, and the youngest are preempted: a reader has nothing unread
    while it waits, so its time counts from when nobody waits any more.
    """
    due = since + UNREAD_S
    while (now := time.monotonic()) < since + TURNS_S:
        waiting = fleet.metric("rayfleet_num_requests_waiting")
        if fleet.metric("rayfleet_num_requests_running") + waiting <= 2:
            return max(now - due, 0.0)
        if waiting:
            due = now + UNREAD_S
        time.sleep(0.5)
    return math.inf


def judge_slow_readers(figures: Mapping[str, Any]) -> list[Check]:
    """Whether what nobody reads has a bound, and others their streams."""
    limit = StreamLimits().total_unread_bytes / MIB + SMALL_GROWTH_MIB
    return [
        at_most("gateway_growth", figures["growth_mib"].get("gateway", 0.0), "MiB", limit),
        at_most("ended", figures["ended_s"], "s", SETTLE_S),
        at_most("longest_gap", figures["longest_gap_ms"], "ms", BYSTANDER_GAP_MS),
        at_least("bystanders_tokens", figures["bystanders_tokens"], "tokens", 1),
        exactly("bystanders_failed", figures["bystanders_failed"], "requests", 0),
    ]


PARTS: Mapping[str, Callable[[AttackedFleet, HostileOptions], tuple[Figures, list[Check]]]] = {
    "requests": run_requests,
    "heavy": lambda fleet, options: run_heavy(fleet, options.scale, options.bodies),
    "half-open": run_half_open,
    "slow-readers": run_slow_readers,
}


if __name__ == "__main__":
    sys.exit(check_main(run_hostile, HostileOptions))
