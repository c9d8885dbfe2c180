"""Effects of killed ranks and of disconnecting clients."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support.effort import IS_LONG
from tests.support.fleet.running_fleet import API_KEY, DEADLINE_S, MODEL, RunningFleet, wait_until

NUM_TOKENS = 250 if IS_LONG else 90
NUM_STREAMS = 12 if IS_LONG else 8


class Stream:
    """A long streamed completion, read in its own thread."""

    def __init__(
        self, fleet: RunningFleet, prompt: str, num_tokens: int = NUM_TOKENS, **fields: object
    ) -> None:
        self.worker = ""
        self.events: list[str] = []
        self.started = threading.Event()
        self._fleet = fleet
        self._body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "stream": True,
            "temperature": 0,
            "return_token_ids": True,
            **fields,
        }
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            with (
                self._fleet.http as http,
                http.stream("POST", "/v1/completions", json=self._body) as response,
            ):
                self.worker = response.headers.get("x-rayfleet-worker", "")
                rest = ""
                for text in response.iter_text():  # httpx splits lines at U+0085, too
                    *lines, rest = (rest + text).split("\n")
                    for line in lines:
                        if line.startswith("data: "):
                            self.events.append(line.removeprefix("data: "))
                            self.started.set()
        except httpx.TransportError as error:
            self.events.append(f"broken off: {error!r}")
        self.started.set()

    def wait(self) -> None:
        self._thread.join(timeout=DEADLINE_S)
        assert not self._thread.is_alive(), "the stream hangs"

    @property
    def finished(self) -> bool:
        return self.events[-1] == "[DONE]" and '"finish_reason":"length"' in self.events[-2]

    @property
    def token_ids(self) -> list[int]:
        choices = [json.loads(event)["choices"][0] for event in self.events[:-1]]
        return [token_id for choice in choices for token_id in choice["token_ids"]]


def gauge(fleet: RunningFleet, name: str, label: str = "") -> float:
    """Sum of a metric over the series with this label."""
    with fleet.http as http:
        text = http.get("/metrics").text
    values = re.findall(rf"^{name}(?:{{[^}}]*{label}[^}}]*}})? (\S+)$", text, re.MULTILINE)
    assert values, f"there is no metric {name}"
    return sum(map(float, values))


def start_streams(fleet: RunningFleet) -> list[Stream]:
    """Starts greedy and seeded streams in turn; returns when all have started."""
    streams = [
        Stream(fleet, f"{i}: a prompt of its own", temperature=float(i % 2), seed=i)
        for i in range(NUM_STREAMS)
    ]
    for stream in streams:
        assert stream.started.wait(timeout=DEADLINE_S)
    return streams


def worker_of_the_last(streams: list[Stream]) -> str:
    """Worker of the stream with the fewest tokens, which has the most left to do. On a busy machine
    other streams may be done by now, and all of them may be on one worker."""
    return min(streams, key=lambda stream: len(stream.events)).worker


@pytest.fixture(scope="module")
def undisturbed(fleet: RunningFleet) -> list[list[int]]:
    """Tokens of the same streams without failures."""
    streams = start_streams(fleet)
    for stream in streams:
        stream.wait()
        assert stream.finished
    return [stream.token_ids for stream in streams]


def num_aborted(fleet: RunningFleet) -> float:
    return gauge(fleet, "rayfleet_request_success_total", 'finished_reason="abort"')


def test_a_client_that_goes_away_frees_its_pages(fleet: RunningFleet) -> None:
    wait_until(lambda: gauge(fleet, "rayfleet_num_requests_running") == 0)
    aborted = num_aborted(fleet)
    with ExitStack() as stack:
        http = stack.enter_context(fleet.http)
        body = {"model": MODEL, "prompt": "going away", "max_tokens": 1500, "ignore_eos": True}
        response = stack.enter_context(
            http.stream("POST", "/v1/completions", json={**body, "stream": True})
        )
        lines = response.iter_lines()  # closing this iterator closes the response
        next(lines)
        wait_until(lambda: gauge(fleet, "rayfleet_num_requests_running") == 1)
    wait_until(lambda: gauge(fleet, "rayfleet_num_requests_running") == 0)
    wait_until(lambda: num_aborted(fleet) == aborted + 1)


def test_a_client_that_stops_waiting_frees_its_pages(fleet: RunningFleet) -> None:
    wait_until(lambda: gauge(fleet, "rayfleet_num_requests_running") == 0)
    aborted = num_aborted(fleet)
    body = {"model": MODEL, "prompt": "not waiting", "max_tokens": 1900, "ignore_eos": True}
    payload = json.dumps(body).encode()
    address = urlsplit(fleet.base_url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\n"
        head += f"Authorization: Bearer {API_KEY}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        wait_until(lambda: gauge(fleet, "rayfleet_num_requests_running") == 1)
    wait_until(lambda: gauge(fleet, "rayfleet_num_requests_running") == 0)
    wait_until(lambda: num_aborted(fleet) == aborted + 1)


@pytest.mark.parametrize(
    ("process", "sign"),
    [
        ("rank 1", signal.SIGKILL),
        pytest.param("rank 0", signal.SIGKILL, marks=pytest.mark.long),
        pytest.param("step of rank 0", signal.SIGKILL, marks=pytest.mark.long),
        pytest.param("rank 1", signal.SIGSTOP, marks=pytest.mark.long),
        pytest.param("step of rank 0", signal.SIGSTOP, marks=pytest.mark.long),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_streams_of_a_lost_rank_group_continue_at_the_other_worker(
    fleet: RunningFleet, undisturbed: list[list[int]], process: str, sign: signal.Signals
) -> None:
    """A stopped rank closes no connection: its step has no result, which takes a while to
    detect."""
    pids = {worker: find(fleet, worker, process) for worker in fleet.index_blocks()}
    num_moved = gauge(fleet, "rayfleet_resubmissions_total")
    streams = start_streams(fleet)
    victim = worker_of_the_last(streams)
    [before] = pids[victim]
    os.kill(before, sign)
    for stream in streams:
        stream.wait()
    assert all(stream.finished for stream in streams)
    assert [stream.token_ids for stream in streams] == undisturbed
    assert gauge(fleet, "rayfleet_resubmissions_total") > num_moved
    wait_until(lambda: before not in fleet.processes())
    wait_until(lambda: fleet.index_blocks().get(victim) == 0)
    # A rank that was not killed itself may take a while to end, so it exists beside the new one.
    wait_until(lambda: find(fleet, victim, process) - {before})
    wait_until(lambda: serves(fleet, victim))
    assert fleet.index_blocks()[victim] > 0


@pytest.mark.long  # tests/router/test_resubmission.py has stub workers that are lost
@pytest.mark.parametrize(
    "sign",
    [pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGSTOP, id="silent")],
)
def test_streams_of_a_lost_worker_continue_at_the_other(
    fleet: RunningFleet, undisturbed: list[list[int]], sign: signal.Signals
) -> None:
    """A stopped process closes no connection: it is detected by missing heartbeats, and killed."""
    before = set(fleet.index_blocks())
    num_moved = gauge(fleet, "rayfleet_resubmissions_total")
    pids = {worker: fleet.front(worker) for worker in before}
    streams = start_streams(fleet)
    front = pids[worker_of_the_last(streams)]
    os.kill(front, sign)
    for stream in streams:
        stream.wait()
    assert all(stream.finished for stream in streams)
    assert [stream.token_ids for stream in streams] == undisturbed
    assert gauge(fleet, "rayfleet_resubmissions_total") > num_moved
    wait_until(lambda: len(fleet.index_blocks()) == 2)
    assert len(before - set(fleet.index_blocks())) == 1, "Serve has started another"


def find(fleet: RunningFleet, worker: str, process: str) -> set[int]:
    """Process ids of the target, or of its replacement."""
    pids = fleet.ranks(worker, int(process[-1]))
    if not process.startswith("step"):
        return pids
    children = set()
    for pid in pids:
        with suppress(OSError):
            children |= {*Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    return set(map(int, children))


def serves(fleet: RunningFleet, worker: str) -> bool:
    """Whether some of a few concurrent requests are routed to `worker`."""
    streams = [Stream(fleet, f"{time.monotonic_ns()} {i}", num_tokens=20) for i in range(6)]
    for stream in streams:
        stream.wait()
    return worker in {stream.worker for stream in streams if stream.finished}
