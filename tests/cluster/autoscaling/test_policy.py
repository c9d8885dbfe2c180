"""Load reports of gateways reach the decisions of Ray Serve's policies, with Serve's wrapping."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.autoscaling_state import _resolve_policy_callable
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingContext

from cluster.app import build_app
from cluster.autoscaling.config import AutoscalingConfig
from cluster.autoscaling.options import gateway_replicas, worker_replicas
from cluster.autoscaling.policy import GatewayPolicy, WorkerPolicy
from cluster.autoscaling.registry import STALE_S, LoadRegistry, flattened
from cluster.config import serve_config_from_mapping
from router.serving.load import LoadReport

pytestmark = pytest.mark.slow

BUSY = LoadReport(num_ready=1.0, work=1.9, num_active=3.0)
WAITING = LoadReport(pending_s=2.0, num_pending=1.0)
CONFIG = AutoscalingConfig(max_workers=3, min_workers=0, upscale_delay_s=0.0)


def series(reports: dict[str, LoadReport], stamp: float) -> dict[str, dict[str, Any]]:
    """Metrics as passed to a policy by Serve: time series by name and replica."""
    found: dict[str, dict[str, Any]] = {}
    for gateway, report in reports.items():
        for name, value in flattened("worker-m", report).items():
            old = SimpleNamespace(timestamp=stamp - 1.0, value=99.0)
            found.setdefault(name, {})[gateway] = [
                old,
                SimpleNamespace(timestamp=stamp, value=value),
            ]
    return found


def context(app: str, deployment: str, target: int, running: int, **fields: Any) -> Any:
    """Serve's context; fields unused by these policies are empty."""
    given: dict[str, Any] = {
        **dict.fromkeys(("deployment_id", "last_scale_up_time", "last_scale_down_time")),
        **{"aggregated_metrics": {}, "raw_metrics": {}, "policy_state": {}, "current_time": 0.0},
        **{"total_num_requests": 0.0, "total_queued_requests": 0.0, "running_replicas": []},
        **{"capacity_adjusted_min_replicas": 0, "capacity_adjusted_max_replicas": 9},
        "config": worker_replicas(1, CONFIG)["autoscaling_config"],
        **fields,
    }
    return AutoscalingContext(
        app_name=app,
        deployment_name=deployment,
        target_num_replicas=target,
        current_num_replicas=running,
        **given,
    )


def test_the_latest_report_of_each_gateway_counts_until_it_is_stale() -> None:
    registry = LoadRegistry()
    assert registry.load("worker-m", 0.0) is None
    registry.replace(series({"a": BUSY, "b": WAITING}, 50.0), 10.0)
    load = registry.load("worker-m", 10.0)
    assert load is not None
    assert (load.num_ready, load.work, load.backlog_s, load.active) == (1, 1.9, 2.0, True)
    assert registry.load("worker-other", 10.0) is None
    registry.replace(series({"a": BUSY, "b": WAITING}, 50.0), 10.0 + STALE_S)
    assert registry.load("worker-m", 10.0 + STALE_S) is None, "no new report"
    registry.replace(series({"b": WAITING}, 51.0), 26.0)
    load = registry.load("worker-m", 26.0)
    assert load is not None
    assert load.work == 0.0, "a gateway that is gone is forgotten"


def test_load_reports_reach_the_policy_of_the_model() -> None:
    gateway = GatewayPolicy(lambda: 5.0)
    worker = _apply_autoscaling_config(WorkerPolicy(lambda: 5.0, **asdict(CONFIG)))
    assert worker(context("app", "worker-m", 1, 1))[0] == 1, "no report yet"
    metrics = series({"a": BUSY}, 1.0)
    assert gateway(context("app", "gateway", 2, 2, raw_metrics=metrics))[0] == 2
    assert worker(context("app", "worker-m", 1, 1))[0] == 3
    assert worker(context("another", "worker-m", 1, 1))[0] == 1


def test_a_policy_measures_starts_by_serves_own_count() -> None:
    """From the decision until the replica runs, with or without load reports."""
    now = [0.0]
    policy = WorkerPolicy(lambda: now[0], **asdict(CONFIG))
    for second, target, running in ((0.0, 1, 1), (1.0, 2, 1), (90.0, 2, 1), (91.0, 2, 2)):
        now[0] = second
        assert policy(context("silent", "worker-m", target, running))[0] == target
    assert policy._autoscaler.start_s == 90.0


def test_waiting_requests_start_the_first_worker() -> None:
    worker = _apply_autoscaling_config(WorkerPolicy(lambda: 5.0, **asdict(CONFIG)))
    metrics = series({"a": LoadReport()}, 1.0)
    GatewayPolicy(lambda: 5.0)(context("zero", "gateway", 1, 1, raw_metrics=metrics))
    assert worker(context("zero", "worker-m", 0, 0))[0] == 0
    metrics = series({"a": WAITING}, 2.0)
    GatewayPolicy(lambda: 5.0)(context("zero", "gateway", 1, 1, raw_metrics=metrics))
    assert worker(context("zero", "worker-m", 0, 0))[0] == 1


def test_serve_restores_pickled_policies() -> None:
    """They are pickled by value, but share one registry."""
    options = gateway_replicas(1, 1, reporting=True)["autoscaling_config"]
    assert (options.min_replicas, options.max_replicas) == (1, 1)
    gateway = _resolve_policy_callable(options.policy)
    worker = _resolve_policy_callable(worker_replicas(1, CONFIG)["autoscaling_config"].policy)
    metrics = series({"a": BUSY}, 1.0)
    gateway(context("pickled", "gateway", 1, 1, raw_metrics=metrics))
    assert worker(context("pickled", "worker-m", 1, 1))[0] == 3


def test_bounds_are_enforced_by_serve() -> None:
    assert gateway_replicas(2, 2, reporting=False) == {"num_replicas": 2}
    scaling = gateway_replicas(2, 5, reporting=False)["autoscaling_config"]
    assert (scaling.min_replicas, scaling.max_replicas) == (2, 5)


def test_the_application_sets_the_policies() -> None:
    models = [
        {"model": "org/one", "device": "cpu", "min_workers": 0, "max_workers": 4},
        {"model": "org/two", "device": "cpu", "num_workers": 2},
    ]
    gateway = build_app({"models": models, "num_gateways": 2})._bound_deployment
    scaling = gateway._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (2, 2)
    handles = gateway.init_args[1]
    first, second = (handles[name]._bound_deployment._deployment_config for name in ("one", "two"))
    assert (first.autoscaling_config.min_replicas, first.autoscaling_config.max_replicas) == (0, 4)
    assert (second.autoscaling_config, second.num_replicas) == (None, 2)
    fixed = build_app({"models": models[1:]})._bound_deployment
    assert fixed._deployment_config.autoscaling_config is None
    assert [route.on_demand for route in gateway.init_args[0].models] == [True, False]


def test_fixed_and_autoscaled_numbers_are_mutually_exclusive() -> None:
    model = {"model": "org/one", "num_workers": 2, "max_workers": 4}
    with pytest.raises(ValueError, match="--num-workers and --max-workers are mutually exclusive"):
        serve_config_from_mapping({"models": [model]})
