"""Workers are added and removed with the load, from none to three and back, without failed
requests.

The number of workers for a load, and its stability, are tested in `tests/cluster/autoscaling`: on a
busy machine, the load itself fluctuates.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import groupby

import httpx
import pytest

from tests.support.fleet.running_fleet import DEADLINE_S, ELASTIC, RunningFleet

NUM_CLIENTS = 8
WANTED = re.compile(rf'^rayfleet_num_workers_wanted{{.*model_name="{ELASTIC}".*}} (\S+)$', re.M)
NUM_TOKENS = 60
READY = re.compile(rf'^rayfleet_workers{{.*model_name="{ELASTIC}".*state="ready".*}} (\S+)$', re.M)


class Load:
    """Closed-loop clients with pauses, `active` of them at a time."""

    def __init__(self, fleet: RunningFleet) -> None:
        self.active = 0
        self.pause_s = 0.0
        self.workers: dict[str, int] = {}
        """Number of answers by worker."""
        self.failures: list[str] = []
        self._fleet = fleet
        self._ended = threading.Event()

    @contextmanager
    def running(self) -> Iterator[Load]:
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            for number in range(NUM_CLIENTS):
                pool.submit(self._client, number)
            try:
                yield self
            finally:
                self._ended.set()

    def _client(self, number: int) -> None:
        with self._fleet.http as http:
            turn = 0
            while not self._ended.is_set():
                if number >= self.active:
                    self._ended.wait(0.05)
                    continue
                turn += 1
                body = {
                    "model": ELASTIC,
                    "prompt": f"{number}, {turn}: what comes next?",
                    "max_tokens": NUM_TOKENS,
                    "ignore_eos": True,
                }
                try:
                    answer = http.post("/v1/completions", json=body)
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))
                    return
                whole = f'"completion_tokens":{NUM_TOKENS}'
                if answer.status_code != 200 or whole not in answer.text:
                    self.failures.append(f"{answer.status_code}: {answer.text}")
                    return
                self._ended.wait(self.pause_s)
                worker = answer.headers["x-rayfleet-worker"]
                self.workers[worker] = self.workers.get(worker, 0) + 1


class Watch:
    """Polls the number of the model's workers until one of the numbers is seen."""

    def __init__(self, fleet: RunningFleet) -> None:
        self.counts: list[int] = []
        self._http = fleet.http

    def until(self, target: Callable[[int], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            self.counts.append(self._ready())
            if target(self.counts[-1]):
                return
            time.sleep(0.2)
        pytest.fail(f"the workers were {self.levels}")

    @property
    def levels(self) -> list[int]:
        return [level for level, _ in groupby(self.counts)]

    def target(self) -> float:
        """Target decided by the policy, as reported by a gateway."""
        [count] = WANTED.findall(self._http.get("/metrics").text)
        return float(count)

    def _ready(self) -> int:
        [count] = READY.findall(self._http.get("/metrics").text)
        return int(float(count))


@pytest.fixture
def elastic(fleet: RunningFleet) -> Iterator[RunningFleet]:
    """The fleet; on exit, the model's processes have ended, since other tests count processes."""
    yield fleet
    wait_gone(fleet)


@pytest.mark.long
def test_workers_follow_the_load_and_no_request_fails(elastic: RunningFleet) -> None:
    fleet = elastic
    watch = Watch(fleet)
    watch.until(lambda count: count == 0)
    with Load(fleet).running() as load:
        load.active, load.pause_s = 1, 1.0
        watch.until(lambda count: count == 1)
        load.active, load.pause_s = NUM_CLIENTS, 0.0
        watch.until(lambda count: count == 3)
        watch.until(lambda count: len(load.workers) >= 3)
        watch.until(lambda count: watch.target() == 3)
        load.active = 0
        watch.until(lambda count: count == 0)
        watch.until(lambda count: watch.target() == 0)
    assert load.failures == []
    wait_gone(fleet)
    assert_none_starts(fleet)


def assert_none_starts(fleet: RunningFleet) -> None:
    """Checks that no worker is started for past requests, which would happen within half a
    second."""
    for _ in range(20):
        assert len(fleet.fronts()) == 2, "a worker was started without requests"
        time.sleep(0.1)


def wait_gone(fleet: RunningFleet) -> None:
    """Waits until the elastic model has no processes."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if len(fleet.fronts()) == 2:
            return
        time.sleep(0.1)
    pytest.fail("a removed worker is still running")
