"""A node fails and another joins, on a Ray cluster of three nodes in a separate process. `make
check-nodes` adds a worker with ranks on two nodes, and the loss of the head."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fleet.running_fleet import DEADLINE_S
from tests.support.paths import ROOT


@pytest.mark.long
def test_streams_continue_when_a_node_is_lost_and_another_joins(
    tiny_chat_model: Path,
) -> None:
    command = [sys.executable, "-m", "tests.campaigns.nodes", "--json"]
    command += ["--model", str(tiny_chat_model), "--no-pair", "--no-head-restart"]
    command += ["--num-tokens", "400", "--node-check-ms", "400"]
    root = ROOT
    timeout_s = 2 * DEADLINE_S  # three Ray nodes start, then a fourth
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, timeout=timeout_s, check=False)
    checks = json.loads(done.stdout.splitlines()[-1])["checks"]
    assert [check for check in checks if not check["holds"]] == []
    assert {check["name"] for check in checks} >= {
        "streams_on_the_lost_node",
        "node_loss_failed",
        "node_loss_changed",
        "workers_back",
        "workers_that_serve",
    }
    assert done.returncode == 0
