"""Dashboards and alert rules against a fleet under load."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from cluster.ports import free_ports
from tests.support.deploy.prometheus_binaries import require, wait_until_ready
from tests.support.deploy.promql import (
    RULES,
    is_exported_here,
    missing,
    panel_queries,
    rule_queries,
)
from tests.support.fleet.running_fleet import API_KEY, MODEL, RunningFleet, wait_until

NUM_REQUESTS = 12
START_S = 600.0
ANSWER_S = 60.0
"""Timeout in seconds; Prometheus starts within a second on an idle machine."""


def put_under_load(fleet: RunningFleet) -> None:
    """Sends requests with and without streaming, of every SLO class and none."""

    def complete(number: int) -> int:
        body = {
            "model": MODEL,
            "prompt": f"{number} is a number",
            "max_tokens": 12,
            "ignore_eos": True,
            "stream": number % 2 == 0,
            "priority": number % 10,
        }
        limit = (None, 100, 1500, 60_000)[number % 4]
        if limit is not None:
            body["slo"] = {"ttft_ms": limit}
        with fleet.http as http:
            return http.post("/v1/completions", json=body).status_code

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(complete, range(NUM_REQUESTS))) == {200}


@pytest.fixture(scope="module")
def loaded(fleet: RunningFleet) -> RunningFleet:
    put_under_load(fleet)
    return fleet


@pytest.fixture(scope="module")
def scrape(loaded: RunningFleet) -> str:
    """Metrics scraped while no process started or ended, since other tests replace workers."""

    def of_the_same_processes() -> bool:
        nonlocal text
        before = replicas(loaded)
        with loaded.http as http:
            text = http.get("/metrics").text
        return before == replicas(loaded) and states_of(text) == {
            "answered": len(before),
            "silent": 0,
        }

    text = ""
    wait_until(of_the_same_processes)
    return text


def replicas(fleet: RunningFleet) -> list[int]:
    """Process ids of all gateways and workers."""
    return sorted(fleet.gateways() + fleet.fronts())


def states_of(text: str) -> dict[str, float]:
    """Processes included in a scrape, and those that are missing."""
    return {
        sample.labels["state"]: sample.value
        for family in parse(text)
        for sample in family.samples
        if sample.name == "rayfleet_node_processes"
    }


def test_every_query_finds_its_series(scrape: str) -> None:
    samples = [(s.name, s.labels) for family in parse(scrape) for s in family.samples]
    queries = panel_queries() | rule_queries()
    assert not {where: lacks for where, q in queries.items() if (lacks := missing(q, samples))}


def test_one_scrape_has_every_process_once(scrape: str) -> None:
    found = {family.name: family.samples for family in parse(scrape)}
    processes = {s.labels["process"].split()[0] for s in found["rayfleet_process_cpu_seconds"]}
    assert processes == {"gateway", "worker"}
    answered = {s.labels["process"] for s in found["rayfleet_process_cpu_seconds"]}
    assert states_of(scrape) == {"answered": len(answered), "silent": 0}
    ready = [s for s in found["rayfleet_worker_ready"] if s.labels["model_name"] == MODEL]
    assert sum(sample.value for sample in ready) == 2
    series = [(s.name, *sorted(s.labels.items())) for f in found.values() for s in f]
    assert len(series) == len(set(series))
    [count] = {
        s.value
        for s in found["rayfleet_request_queue_time_seconds"]
        if s.name.endswith("_count") and s.labels["slo_class"] == "server"
    }
    assert count == NUM_REQUESTS / 4


def test_promtool_accepts_the_scrape(scrape: str) -> None:
    result = subprocess.run(
        [require("promtool"), "check", "metrics"], input=scrape, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr


@contextmanager
def prometheus(fleet: RunningFleet, folder: Path) -> Iterator[httpx.Client]:
    """Prometheus that scrapes the fleet twice a second and evaluates the rules."""
    target = urlsplit(fleet.base_url).netloc
    config = folder / "prometheus.yml"
    config.write_text(
        f"""
global: {{scrape_interval: 500ms, evaluation_interval: 500ms}}
rule_files: [{RULES}]
scrape_configs:
  - job_name: rayfleet
    authorization: {{credentials: {API_KEY}}}
    static_configs: [{{targets: ["{target}"]}}]
"""
    )
    address = f"127.0.0.1:{free_ports(1)[0]}"
    process = subprocess.Popen(
        [
            *(
                require("prometheus"),
                f"--config.file={config}",
                f"--storage.tsdb.path={folder}/data",
            ),
            *(f"--web.listen-address={address}", "--log.level=error"),
        ],
        env={**os.environ, "GOMAXPROCS": "1"},
    )
    try:
        wait_until_ready(f"http://{address}", process, START_S)
        with httpx.Client(
            base_url=f"http://{address}/api/v1", trust_env=False, timeout=60
        ) as client:
            yield client
    finally:
        process.terminate()
        process.wait(timeout=60)


def result_of(client: httpx.Client, query: str) -> list[object]:
    answer = client.get("/query", params={"query": query}).json()
    assert answer["status"] == "success", (query, answer)
    return list(answer["data"]["result"])


@pytest.mark.long  # the series are those of a scrape, and promtool accepts the queries
def test_prometheus_answers_every_panel(loaded: RunningFleet, tmp_path: Path) -> None:
    with prometheus(loaded, tmp_path) as client:
        deadline = time.monotonic() + START_S

        def wait_for_scrapes(count: int) -> None:
            # After a scrape that takes too long, as on a busy machine, `up` is 0.
            query = f'sum_over_time(up{{job="rayfleet"}}[1m]) >= {count}'
            while not result_of(client, query):
                assert time.monotonic() < deadline, "Prometheus does not scrape"
                time.sleep(0.2)

        def unanswered() -> list[str]:
            return [
                where
                for where, query in panel_queries().items()
                if not result_of(client, query) and is_exported_here(query)
            ]

        wait_for_scrapes(1)
        put_under_load(loaded)
        wait_for_scrapes(4)
        # After a failed scrape, instant queries return nothing until the next one.
        deadline = time.monotonic() + ANSWER_S
        while empty := unanswered():
            assert time.monotonic() < deadline, empty
            time.sleep(0.2)
        groups = client.get("/rules").json()["data"]["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert {rule["name"] for rule in rules} == set(rule_queries())
        assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
        firing = {rule["name"] for rule in rules if rule["state"] == "firing"}
        assert firing <= {"RayfleetSloBurnFast", "RayfleetSloBurnSlow"}
