"""What a Serve config builds, before any node has joined."""

from __future__ import annotations

import subprocess
import sys

from cluster.app import build_app
from cluster.environment import cluster_settings


def test_a_config_may_name_a_device_that_no_node_has_yet() -> None:
    """Serve builds the application when the head is up; nodes with GPUs may come minutes later."""
    app = build_app({"models": [{"model": "org/model", "device": "cuda"}]})
    assert app._bound_deployment.name == "gateway"


def test_settings_of_the_nodes_are_printed_for_a_shell() -> None:
    command = [sys.executable, "-m", "cluster.environment"]
    script = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    shell = f"{script}\nenv -0"
    printed = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True).stdout
    environment = dict(entry.split("=", 1) for entry in printed.split("\0") if "=" in entry)
    assert cluster_settings().items() <= environment.items()
