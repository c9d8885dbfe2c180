"""Gateways export the target number of workers of Serve."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families as parse

from cluster.config import serve_config_from_mapping
from cluster.targets import follow_targets, target_of
from router.fleet import Fleet
from router.metrics.collector import GatewayCollector, Source
from router.metrics.http import HttpStats
from router.metrics.stats import ModelStats, WorkerTarget
from worker.protocol.exposition import content_type_for, render

FIXED = {"target_num_replicas": 4, "deployment_config": {"num_replicas": 4}}
ELASTIC = {
    "target_num_replicas": 7,
    "deployment_config": {"autoscaling_config": {"min_replicas": 0, "max_replicas": 9}},
}


def test_a_fixed_number_is_both_bounds() -> None:
    assert target_of(FIXED) == WorkerTarget(4, 4, 4)
    assert target_of(ELASTIC) == WorkerTarget(7, 0, 9)


async def test_the_last_target_is_kept_while_the_controller_is_unavailable() -> None:
    targets: list[WorkerTarget] = []
    queried = asyncio.Event()
    answers: list[Mapping[str, Any]] = [
        {"applications": {"app": {"deployments": {"worker-m": ELASTIC, "gateway": FIXED}}}},
        {"applications": {}},
    ]

    async def read_targets() -> Mapping[str, Any]:
        if answers:
            return answers.pop(0)
        queried.set()
        raise ConnectionError("the controller is gone")

    following = asyncio.create_task(
        follow_targets("app", {"worker-m": targets.append}, read_targets, 0.0)
    )
    async with asyncio.timeout(60):
        await queried.wait()
    await asyncio.sleep(0)
    assert not following.done()
    following.cancel()
    assert targets == [WorkerTarget(7, 0, 9)]


def test_wanted_and_ready_workers_are_metrics() -> None:
    stats = ModelStats()
    stats.workers = WorkerTarget(7, 0, 9)
    gateway = GatewayCollector("g", [Source("m", stats, Fleet())], HttpStats())
    text = render(gateway.collect(), content_type_for(""))
    values = {s.name: s.value for family in parse(text.decode()) for s in family.samples}
    names = ("wanted", "ready", "min", "max")
    assert [values[f"rayfleet_num_workers_{name}"] for name in names] == [7, 0, 0, 9]


def test_the_initial_target_is_the_configured_number() -> None:
    models = [
        {"model": "org/one", "min_workers": 2, "max_workers": 4},
        {"model": "org/two", "num_workers": 3},
    ]
    routes = serve_config_from_mapping({"models": models}).gateway().models
    assert [(route.min_workers, route.max_workers) for route in routes] == [(2, 4), (3, 3)]
