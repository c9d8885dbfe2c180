"""Simulation of a large fleet: complete, with the requested blocks and failures."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from deploy.benchmarks.routing.simulated import Clock, SimulatedRouter
from deploy.benchmarks.routing.simulation import Simulation
from tests.campaigns.checks import check_main
from tests.campaigns.scale.capacity import Needs, breaks_first
from tests.campaigns.scale.gateway import TimedGateway
from tests.campaigns.scale.main import run_scale
from tests.campaigns.scale.options import ScaleOptions
from tests.campaigns.scale.traffic import scale_workload

SMALL = ScaleOptions(
    workers=30, blocks=30_000, duration_s=8.0, rate=0.5, failures_per_minute=1.0, output_len=3
)


def test_every_request_is_served_though_workers_die() -> None:
    result = run_scale(SMALL)
    assert result["num_requests"] == 120
    assert result["num_blocks"] == 30_000
    assert result["workers_failed"] == 4
    assert result["requests_moved"] > 0
    assert result["requests_failed"] == 0
    assert 0.0 < result["hit_rate"] < 1.0
    assert 0.0 < result["decision_p50_ms"] <= result["decision_p99_ms"]
    names = [check["name"] for check in result["checks"]]
    assert names == ["decision_p99_ms", "num_blocks", "num_workers", "wall_minutes"]
    holds = {check["name"]: check["holds"] for check in result["checks"]}
    assert not holds["num_workers"], "thirty are no ten thousand"


def test_a_worker_that_died_comes_back_without_its_old_cache() -> None:
    gateways: list[TimedGateway] = []

    def create(clock: Clock) -> SimulatedRouter:
        gateways.append(TimedGateway(SMALL, clock))
        return gateways[0]

    workload = scale_workload(SMALL)
    Simulation(workload, create).run()
    fleet = gateways[0].fleet
    dead = {f"w{incident.worker}" for incident in workload.incidents}
    assert len(dead) == 4
    for worker in fleet.workers:
        held = fleet.index.num_blocks(worker.worker_id)
        assert worker.ready
        assert worker.epoch == (2 if worker.worker_id in dead else 1)
        assert held < 1000 if worker.worker_id in dead else held >= 1000


@pytest.mark.long
def test_the_autoscaler_has_workers_join_and_nobody_fails() -> None:
    """Twenty workers, kept busy by the traffic, without failures."""
    options = ScaleOptions(
        workers=20,
        max_workers=60,
        blocks=20_000,
        duration_s=60.0,
        rate=3.0,
        failures_per_minute=0.0,
        output_len=8,
        slowness=8.0,
    )
    result = run_scale(options)
    assert result["requests_failed"] == 0
    assert result["autoscale_targets"][0] == 20
    assert result["autoscale_targets"] == sorted(result["autoscale_targets"])
    assert result["autoscale_targets"][-1] > 20
    fixed = run_scale(replace(options, max_workers=0))
    assert fixed["autoscale_targets"] == [20]
    assert fixed["autoscale_most_wanted"] > 20
    assert result["p99_ttft_s"] < fixed["p99_ttft_s"]


def test_the_command_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--workers 8 --blocks 800 --duration-s 2 --output-len 2 --rate 1 --json"
    assert check_main(run_scale, ScaleOptions, flags.split()) == 1, "eight are no ten thousand"
    assert json.loads(capsys.readouterr().out)["num_workers"] == 8


def test_what_breaks_first_is_what_takes_most() -> None:
    needs = Needs(
        workers=10_000,
        decisions_per_s=2_000.0,
        decision_s=5e-4,
        reports_per_s=200_000.0,
        report_s=4e-5,
        failures_per_s=2.0,
        failure_s=1e-3,
        index_bytes=3 * 2**30,
        memory_bytes=24 * 2**30,
    )
    assert breaks_first(needs).startswith("reports")
    assert needs.cores["reports"] == pytest.approx(8.0)
    assert breaks_first(replace(needs, reports_per_s=1.0)).startswith("decisions")


def test_a_wrong_value_is_named() -> None:
    with pytest.raises(ValueError, match="--workers must be greater than 0"):
        ScaleOptions(workers=0)
