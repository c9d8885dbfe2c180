"""A killed GCS is restarted with its state, and Ray calls continue."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cluster.gcs import can_restart_gcs, with_port
from tests.support.effort import IS_LONG

pytestmark = pytest.mark.skipif(not can_restart_gcs(), reason="Linux restarts the GCS alone")
NUM_KILLS = 2 if IS_LONG else 1
SCRIPT = """
import os
import sys
from pathlib import Path
from cluster.environment import prepare
environment = prepare(host="127.0.0.1", port=8000, haproxy=False)
from cluster.launch import end_processes_of, start_local_ray
from cluster.gcs import GcsSupervisor
start_local_ray(environment.directory, 2, print)
import ray
from ray._private.worker import _global_node as node

@ray.remote(num_cpus=0)
class Actor:
    def process(self):
        return os.getpid()

before = Actor.options(name="before").remote()
process = ray.get(before.process.remote())
supervisor = GcsSupervisor()
for _ in range(int(sys.argv[1])):
    killed = node.all_processes["gcs_server"][0].process
    killed.kill()
    # It is created through the GCS, so this waits for the next one.
    assert ray.get(Actor.remote().process.remote(), timeout=50) != process
    assert node.all_processes["gcs_server"][0].process.pid != killed.pid
    assert ray.get(ray.get_actor("before").process.remote()) == process
    assert [entry["Alive"] for entry in ray.nodes()] == [True]
supervisor.stop()
last = node.all_processes["gcs_server"][0].process
ray.shutdown()
assert last.wait(30) is not None
end_processes_of(environment.directory, grace_s=5.0)
environment.close()
print("restarted")
"""


def test_a_restarted_gcs_keeps_its_port() -> None:
    command = ["gcs_server", "--gcs_server_port=0", "--other=1"]
    assert with_port(command, 7) == ["gcs_server", "--gcs_server_port=7", "--other=1"]


@pytest.mark.randomized  # with more kills
def test_a_killed_gcs_is_restarted_with_its_state() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(NUM_KILLS)],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.stdout.strip().endswith("restarted"), done.stdout + done.stderr
