"""Load generators of `--load-tasks`, with threads in place of Ray's actors.

`tests/e2e/test_spread_load.py` runs a job with actors of Ray.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from cluster.bench.client import completion_request
from cluster.bench.jobs import spread
from cluster.bench.load import Load
from tests.support.cluster.openai_backend import Backend

NUM_REQUESTS = 10
UVLOOP_TIMER_S = 0.002
"""uvloop's timers count whole milliseconds and can end that much too early."""
GENERATOR = spread._Generator.__ray_metadata__.modified_class


class ThreadActor:
    """A generator whose methods run in the pool."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._generator = GENERATOR()

    def __getattr__(self, name: str) -> SimpleNamespace:
        method: Callable[..., Any] = getattr(self._generator, name)
        return SimpleNamespace(remote=lambda *arguments: self._pool.submit(method, *arguments))


class ThreadRay:
    """Ray with actors in threads, with room for some."""

    exceptions = ray.exceptions

    def __init__(self, pool: ThreadPoolExecutor, num_places: int) -> None:
        self.num_places = num_places
        self.actors: list[ThreadActor] = []
        self.options_of_actors: list[dict[str, Any]] = []
        self._pool = pool

    def is_initialized(self) -> bool:
        return True

    def options(self, **options: Any) -> SimpleNamespace:
        self.options_of_actors.append(options)
        return SimpleNamespace(remote=self._start)

    def get(self, calls: list[Future[Any]], timeout: float | None = None) -> list[Any]:
        if len(self.actors) > self.num_places:
            raise ray.exceptions.GetTimeoutError
        return [call.result() for call in calls]

    def kill(self, actor: ThreadActor) -> None:
        self.actors.remove(actor)

    def _start(self) -> ThreadActor:
        self.actors.append(ThreadActor(self._pool))
        return self.actors[-1]


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadRay]:
    with ThreadPoolExecutor(4) as pool:
        threads = ThreadRay(pool, num_places=3)
        monkeypatch.setattr(spread, "ray", threads)
        monkeypatch.setattr(spread, "_Generator", threads)
        yield threads


def load_of(backend: Backend, max_concurrency: int | None) -> Load:
    requests = tuple(
        completion_request(index, "toy", [index, 1], 2, arrival_s=index / 100)
        for index in range(NUM_REQUESTS)
    )
    return Load(
        url=f"{backend.url}/v1/completions",
        headers={},
        requests=requests,
        max_concurrency=max_concurrency,
    )


def test_generators_share_a_load_and_start_together(backend: Backend, threads: ThreadRay) -> None:
    backend.pace_s = 0.01
    generators = spread.Generators(3)
    assert [one["scheduling_strategy"] for one in threads.options_of_actors] == ["SPREAD"] * 3
    called_at = time.time()
    result = generators.run(load_of(backend, None))
    assert time.time() - called_at >= spread._LEAD_S, "all wait for the agreed time"
    assert result.num_processes == 3
    assert [record.error for record in result.records] == [""] * NUM_REQUESTS
    assert [record.index for record in result.records] == list(range(NUM_REQUESTS))
    assert sorted(body["prompt"][0] for body in backend.bodies) == list(range(NUM_REQUESTS))
    # Starts are relative to the agreed time, and follow the arrivals of the whole load.
    starts = [record.start for record in result.records]
    assert all(start >= index / 100 - UVLOOP_TIMER_S for index, start in enumerate(starts))
    generators.close()
    assert threads.actors == []


def test_no_more_generators_than_concurrent_requests_send(
    backend: Backend, threads: ThreadRay
) -> None:
    result = spread.Generators(3).run(load_of(backend, 2))
    assert result.num_processes == 2
    assert len(result.records) == NUM_REQUESTS
    assert backend.most_running <= 2


def test_generators_that_cannot_be_placed_are_an_error(threads: ThreadRay) -> None:
    with pytest.raises(ValueError, match="not enough CPUs for 4 load generators"):
        spread.Generators(4)
