"""An application with two gateways: each serves the responses that the other one has stored, and
streams finish if the application is deleted.

It runs beside the fleet of all tests, on the same Ray cluster and behind the same HAProxy, with
real gateways and the worker frontend under Ray Serve, and a paced worker as the engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import httpx

from router.api.responses.store import gateway_of
from tests.support.fleet.running_fleet import DEADLINE_S, RunningFleet
from tests.support.paths import ROOT

APPLICATION = "draining"
NUM_GATEWAYS = 2
NUM_STREAMS = 4
NUM_TOKENS = 100
STEP_S = 0.02
NUM_READS = 6
"""Requests for each response, each on a new connection, which HAProxy forwards to any gateway."""


def test_gateways_share_responses_and_streams_outlive_the_end_of_the_application(
    fleet: RunningFleet, tiny_chat_model: Path
) -> None:
    """Serve only sees each worker's silent call, which must keep the worker running."""
    address, environment = fleet.ray()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.e2e.test_draining",
            address,
            fleet.base_url,
            str(tiny_chat_model),
        ],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        timeout=2 * DEADLINE_S,
        check=True,
    )
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["statuses"] == [200] * NUM_GATEWAYS * NUM_READS
    assert report["links"] == [NUM_GATEWAYS]
    assert report["tokens_when_told_to_go"] < NUM_STREAMS * NUM_TOKENS // 2
    assert report["tokens"] == [NUM_TOKENS] * NUM_STREAMS


class _Streams:
    """Concurrent streamed completions, each read in its own thread."""

    def __init__(self, base_url: str, model: str) -> None:
        self.tokens = [0] * NUM_STREAMS
        self._url = f"{base_url}/v1/completions"
        self._model = model
        self._threads = [
            threading.Thread(target=self._read, args=(number,), daemon=True)
            for number in range(NUM_STREAMS)
        ]
        for thread in self._threads:
            thread.start()

    def wait_begun(self) -> None:
        while not all(self.tokens):
            time.sleep(0.01)

    def wait(self) -> None:
        for thread in self._threads:
            thread.join(timeout=DEADLINE_S)

    def _read(self, number: int) -> None:
        body = {
            "model": self._model,
            "prompt": f"{number}: a prompt of its own",
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        with httpx.stream("POST", self._url, json=body, timeout=DEADLINE_S) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    choices = json.loads(line[6:]).get("choices", [])
                    self.tokens[number] += sum(len(c["token_ids"]) for c in choices)


def main(address: str, base_url: str, model: str) -> None:
    """Serves a worker, deletes the application during streams, and prints their outcome."""
    from cluster.config import EndpointConfig, FleetConfig, ModelSpec, ServeConfig
    from cluster.local_ray import join_ray
    from worker.config import EngineConfig

    join_ray(address)
    from ray import cloudpickle, serve

    from deploy.benchmarks import routing
    from deploy.benchmarks.routing.paced import run_steady
    from deploy.benchmarks.routing.paced_group import build_paced

    cloudpickle.register_pickle_by_value(routing)  # the fleet runs from the wheel
    fleet = FleetConfig(served_model_name="paced")
    engine = EngineConfig.of(model=model, device="cpu")
    endpoint = EndpointConfig(num_gateways=NUM_GATEWAYS)
    config = ServeConfig(endpoint=endpoint, models=(ModelSpec(fleet=fleet, engine=engine),))
    others = _links()
    serve.run(
        build_paced(config, partial(run_steady, STEP_S)),
        name=APPLICATION,
        route_prefix=f"/{APPLICATION}",
    )
    try:
        statuses = _read_responses(f"{base_url}/{APPLICATION}/v1/responses", "paced")
        links = [count for path, count in _links().items() if path not in others]
        streams = _Streams(f"{base_url}/{APPLICATION}", "paced")
        streams.wait_begun()
        serve.delete(APPLICATION, _blocking=False)
        reported_at = sum(streams.tokens)
        streams.wait()
    finally:
        serve.delete(APPLICATION)
    print(
        json.dumps(
            {
                "statuses": statuses,
                "links": links,
                "tokens_when_told_to_go": reported_at,
                "tokens": streams.tokens,
            }
        )
    )


def _read_responses(url: str, model: str) -> list[int]:
    """Stores a response at each gateway, and reads each of them several times; returns the
    statuses."""
    stored: dict[str | None, str] = {}
    deadline = time.monotonic() + DEADLINE_S
    while len(stored) < NUM_GATEWAYS:
        assert time.monotonic() < deadline, f"only {list(stored)} answer"
        body = {"model": model, "input": "hello", "max_output_tokens": 4}
        response = httpx.post(url, json=body, timeout=DEADLINE_S).raise_for_status()
        response_id = response.json()["id"]
        stored[gateway_of(response_id)] = response_id
    return [
        httpx.get(f"{url}/{response_id}", timeout=DEADLINE_S).status_code
        for response_id in stored.values()
        for _ in range(NUM_READS)
    ]


def _links() -> dict[str, int]:
    """Number of connections of each attach socket of this fleet, without the listening one."""
    directory = os.environ["RAYFLEET_RUNTIME_DIRECTORY"]
    counts: dict[str, int] = {}
    for line in Path("/proc/net/unix").read_text().splitlines():
        path = line.split()[-1]
        if path.startswith(directory) and path.endswith("/attach"):
            counts[path] = counts.get(path, -1) + 1
    return counts


if __name__ == "__main__":
    main(*sys.argv[1:])
