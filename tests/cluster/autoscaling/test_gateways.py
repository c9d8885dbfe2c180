"""Scaling of gateways by CPU usage."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.autoscaling.gateways import (
    CPU,
    DOWNSCALE_DELAY_S,
    UPSCALE_DELAY_S,
    CpuMeter,
    GatewayScaler,
)
from cluster.autoscaling.registry import STALE_S, LoadRegistry
from cluster.config import serve_config_from_mapping


def run(scaler: GatewayScaler, loads: list[tuple[float, float]], target: int = 1) -> list[int]:
    """Targets after each period, given as seconds and CPU usage in cores."""
    targets, now = [], 0.0
    for seconds, num_processors in loads:
        end = now + seconds
        while now < end:
            target = scaler.decide(num_processors, target, now)
            now += 1.0
        targets.append(target)
    return targets


def test_gateways_scale_up_soon_and_down_late() -> None:
    loads = [(60.0, 0.3), (UPSCALE_DELAY_S + 2, 1.7), (DOWNSCALE_DELAY_S - 2, 0.3), (60.0, 0.3)]
    assert run(GatewayScaler(), loads) == [1, 3, 3, 1]


def test_bursts_start_no_gateway() -> None:
    assert run(GatewayScaler(), [(60.0, 0.3), (UPSCALE_DELAY_S - 2, 4.0), (60.0, 0.3)]) == [1, 1, 1]


def test_a_new_controller_stops_no_gateway_before_a_full_window() -> None:
    loads = [(DOWNSCALE_DELAY_S - 2, 0.1), (10.0, 0.1)]
    assert run(GatewayScaler(), loads, target=4) == [4, 1]


def test_at_least_one_gateway_is_kept() -> None:
    assert run(GatewayScaler(), [(2 * DOWNSCALE_DELAY_S, 0.0)], target=3) == [1]


def test_the_usage_of_all_running_gateways_counts() -> None:
    def points(value: float, stamp: float) -> list[Any]:
        return [SimpleNamespace(timestamp=stamp, value=value)]

    registry = LoadRegistry()
    assert registry.total(CPU, 0.0) is None
    registry.replace({CPU: {"a": points(0.5, 1.0), "b": points(0.25, 1.0)}}, 1.0)
    assert registry.total(CPU, 1.0) == 0.75
    assert registry.total(CPU, 1.0 + STALE_S) is None


def test_the_meter_measures_cpu_usage() -> None:
    meter = CpuMeter()
    began = time.process_time()
    while time.process_time() - began < 0.05:
        pass
    assert meter.read() > 0.0
    time.sleep(0.1)  # what is measured: a process that waits uses no processor
    assert meter.read() < 0.5


def test_bounds_of_the_number_of_gateways_fit_together() -> None:
    settings = {"models": [{"model": "org/one", "device": "cpu"}], "num_gateways": 2}
    with pytest.raises(ValueError, match="--max-gateways must be 0 or at least --num-gateways"):
        serve_config_from_mapping({**settings, "max_gateways": 1})
