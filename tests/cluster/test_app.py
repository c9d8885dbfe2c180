"""The application built from a Serve config, before any node has joined."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import yaml

from cluster.app import build_app, build_application
from cluster.config import serve_config_from_mapping
from cluster.environment import cluster_settings
from tests.support.paths import ROOT


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_a_config_may_name_a_device_that_no_node_has_yet() -> None:
    """Serve builds the application on the head; GPU nodes may join minutes later."""
    app = build_app({"models": [{"model": "org/model", "device": "cuda"}]})
    assert app._bound_deployment.name == "gateway"


def test_serve_has_the_bounds_of_gateways() -> None:
    models = [{"model": "org/one", "device": "cpu"}]
    app = build_app({"models": models, "num_gateways": 2, "max_gateways": 5})._bound_deployment
    assert app._deployment_config.autoscaling_config.max_replicas == 5


@pytest.mark.parametrize(
    ("options", "surge_percent", "strategy"),
    [
        ({"device": "cpu"}, 100, "STRICT_PACK"),
        ({"device": "cpu", "num_workers": 3, "tensor_parallel_placement": "pack"}, 33, "PACK"),
        ({"device": "cpu", "num_workers": 300}, 1, "STRICT_PACK"),
        ({"device": "cuda", "tensor_parallel_placement": "spread"}, 0, "SPREAD"),
    ],
)
def test_what_an_update_may_start_first_and_where_ranks_are(
    options: dict[str, object], surge_percent: int, strategy: str
) -> None:
    gateway = build_app({"models": [{"model": "org/model", **options}]})._bound_deployment
    assert gateway._deployment_config.max_surge_percent == 100
    worker = gateway.init_args[1]["model"]._bound_deployment
    assert worker._deployment_config.max_surge_percent == surge_percent
    assert worker._replica_config.placement_group_strategy == strategy


def test_a_serve_config_is_waited_for_and_a_person_is_not_kept_waiting() -> None:
    """KubeRay applies a config only once, so Serve must not give up on transient problems."""
    args = {"models": [{"model": "/models/late", "device": "cpu"}]}
    gateway = build_app(args)._bound_deployment
    worker = gateway.init_args[1]["late"]._bound_deployment
    assert gateway.init_args[0].startup_retry_s == math.inf
    assert worker.init_kwargs["startup_retry_s"] == math.inf
    assert worker._deployment_config.max_constructor_retry_count > 1

    watched = build_application(serve_config_from_mapping(args))._bound_deployment
    worker = watched.init_args[1]["late"]._bound_deployment
    assert watched.init_args[0].startup_retry_s == 0.0
    assert worker.init_kwargs["startup_retry_s"] == 0.0
    assert worker._deployment_config.max_constructor_retry_count == 1

    patient = build_app({**args, "startup_retry_s": 60})._bound_deployment
    assert patient.init_args[0].startup_retry_s == 60


def test_options_of_actors_in_a_serve_config_lose_nothing_of_ours() -> None:
    """Serve replaces the code's `ray_actor_options` with these, without merging."""
    path = ROOT / "deploy" / "serve" / "gpu.yaml"
    [application] = yaml.safe_load(path.read_text())["applications"]
    endpoint = "http://collector:4318/v1/traces"
    app = build_app({**application["args"], "otlp_traces_endpoint": endpoint})
    models = app._bound_deployment.init_args[1]
    deployments = [app._bound_deployment, *(m._bound_deployment for m in models.values())]
    overrides: dict[str, Any] = {
        entry["name"]: entry["ray_actor_options"]
        for entry in application["deployments"]
        if "ray_actor_options" in entry
    }
    assert "gateway" in overrides
    for deployment in deployments:
        ours = deployment.ray_actor_options
        theirs = deployment.options(ray_actor_options=overrides.get(deployment.name, ours))
        assert endpoint in (*theirs.init_args, *theirs.init_kwargs.values())
        assert "runtime_env" not in ours, "would be lost where the options are replaced"


def test_settings_of_the_nodes_are_printed_for_a_shell() -> None:
    command = [sys.executable, "-m", "cluster.environment"]
    script = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    shell = f"{script}\nenv -0"
    printed = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True).stdout
    environment = dict(entry.split("=", 1) for entry in printed.split("\0") if "=" in entry)
    assert cluster_settings().items() <= environment.items()
