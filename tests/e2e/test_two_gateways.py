"""A fleet with two gateways behind HAProxy: stored responses and counters are shared by both."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import httpx
import pytest

from router.api.responses.store import gateway_of
from tests.support.fleet.running_fleet import (
    API_KEY,
    DEADLINE_S,
    RunningFleet,
    start_fleet,
    stop_fleet,
    wait_until,
)
from tests.support.paths import MODELS

KEYS = """
[three]
key = "three"
max_concurrent_requests = 3
[ten]
key = "ten"
requests_per_minute = 10
"""
MODEL = "demo"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    folder = tmp_path_factory.mktemp("two")
    keys = folder / "keys.toml"
    keys.write_text(KEYS)
    flags = ("--num-gateways", "2", "--device", "cpu", "--served-model-name", MODEL)
    fleet = start_fleet(folder, *flags, "--api-key-file", str(keys))
    try:
        with fleet.http as http:
            wait_until(lambda: is_ready(http, fleet))
        yield fleet
    finally:
        stop_fleet(fleet)


def is_ready(http: httpx.Client, fleet: RunningFleet) -> bool:
    fleet.check_runs()
    try:
        return http.get("/ready").status_code == 200 and len(gateways_of(fleet)) == 2
    except httpx.TransportError:
        return False


def gateways_of(fleet: RunningFleet) -> dict[str, str]:
    """A response of each gateway behind HAProxy, by gateway id."""
    made = {}
    for _ in range(8):
        response = send_request(
            fleet, "POST", "/v1/responses", json=BODY | {"max_output_tokens": 4}
        )
        if response.status_code == 200:
            made[str(gateway_of(response.json()["id"]))] = response.json()["id"]
    return made


BODY = {"model": MODEL, "input": "hello"}
END_TOKENS = json.loads((MODELS / "demo" / "generation_config.json").read_text())["eos_token_id"]
LONG = BODY | {"max_output_tokens": 1500, "logit_bias": {str(token): -100 for token in END_TOKENS}}
"""Takes longer than all requests of a test: the demo model would stop after a sentence."""


@cache
def client() -> httpx.Client:
    """One shared client: each client loads the certificate authorities, in 30 ms of CPU time."""
    return httpx.Client(timeout=DEADLINE_S)


def send_request(
    fleet: RunningFleet, method: str, path: str, key: str = API_KEY, **arguments: object
) -> httpx.Response:
    """Sends a request on a new connection, which HAProxy forwards to any gateway."""
    headers = {"authorization": f"Bearer {key}", "connection": "close"}
    url = f"{fleet.base_url}{path}"
    return client().request(method, url, headers=headers, **arguments)  # type: ignore[arg-type]


def test_every_gateway_answers_for_responses_of_both(fleet: RunningFleet) -> None:
    for response_id in gateways_of(fleet).values():
        path = f"/v1/responses/{response_id}"
        assert {send_request(fleet, "GET", path).status_code for _ in range(8)} == {200}
        going_on = [
            send_request(
                fleet, "POST", "/v1/responses", json=BODY | {"previous_response_id": response_id}
            )
            for _ in range(4)
        ]
        assert {response.status_code for response in going_on} == {200}
        assert {send_request(fleet, "GET", path, "ten").status_code for _ in range(4)} == {404}


def test_a_background_stream_is_read_at_every_gateway(fleet: RunningFleet) -> None:
    made = send_request(
        fleet, "POST", "/v1/responses", json=BODY | {"background": True, "stream": True}
    )
    response_id = made.text.split('"id":"')[1].split('"')[0]
    path = f"/v1/responses/{response_id}?stream=true"
    assert {send_request(fleet, "GET", path).text for _ in range(6)} == {made.text}


def test_limits_of_keys_are_exact_over_gateways(fleet: RunningFleet) -> None:
    began = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(lambda _: short(fleet, "ten"), range(40)))
    refilled = (time.monotonic() - began) / 6.0
    assert set(statuses) == {200, 429}
    assert 10 <= statuses.count(200) <= 10 + refilled
    body = LONG | {"background": True}
    with ThreadPoolExecutor(10) as pool:  # concurrently: none has finished
        made = list(
            pool.map(
                lambda _: send_request(fleet, "POST", "/v1/responses", "three", json=body),
                range(10),
            )
        )
    open_now = [response for response in made if response.status_code == 200]
    assert {response.status_code for response in made} == {200, 429}
    ended = 0
    for response in open_now:
        path = f"/v1/responses/{response.json()['id']}"
        ended += send_request(fleet, "GET", path, "three").json()["status"] not in (
            "queued",
            "in_progress",
        )
        send_request(fleet, "POST", f"{path}/cancel", "three")
    assert len(open_now) - ended <= 3
    assert len(open_now) >= 3
    assert short(fleet, "three") == 200, "what was cancelled no longer counts"


def test_after_a_gateway_has_died_its_responses_are_404_and_its_requests_do_not_count(
    fleet: RunningFleet,
) -> None:
    body = LONG | {"background": True}
    made = [
        send_request(fleet, "POST", "/v1/responses", "three", json=body).json() for _ in range(3)
    ]
    before = gateways_of(fleet)
    victim, _ = fleet.gateways()
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: len(set(gateways_of(fleet)) - set(before)) == 1)
    after = gateways_of(fleet)
    for gateway_id, response_id in before.items():
        expected = 200 if gateway_id in after else 404
        path = f"/v1/responses/{response_id}"
        assert {send_request(fleet, "GET", path).status_code for _ in range(6)} == {expected}
    for response in made:
        send_request(fleet, "POST", f"/v1/responses/{response.get('id')}/cancel", "three")
    assert [short(fleet, "three") for _ in range(4)] == [200] * 4


def short(fleet: RunningFleet, key: str) -> int:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 2}
    return send_request(fleet, "POST", "/v1/completions", key, json=body).status_code
