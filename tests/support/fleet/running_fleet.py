"""A fleet started by the command line, and helpers to find its processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from cluster.drain import find_raylets
from cluster.ports import free_ports
from tests.support.reaper import kill_with_this_process, marked

if TYPE_CHECKING:
    from openai import OpenAI

API_KEY = "key-of-the-tests"
ADMIN_KEY = "key-of-the-admin"
MODEL = "tiny"
ELASTIC = "elastic"
"""Name of the model that is autoscaled."""
DEADLINE_S = 600.0
"""Timeout in seconds; operations take seconds on an idle machine."""


@dataclass(frozen=True)
class RunningFleet:
    """The command's process and its endpoint."""

    process: subprocess.Popen[bytes]
    base_url: str

    @property
    def client(self) -> OpenAI:
        from openai import OpenAI  # 1.3 s of CPU time, of each process that collects tests

        url = f"{self.base_url}/v1"
        return OpenAI(base_url=url, api_key=API_KEY, max_retries=0, timeout=DEADLINE_S)

    @property
    def http(self) -> httpx.Client:
        headers = {"authorization": f"Bearer {API_KEY}"}
        # Without `verify` each client loads all certificates, which takes 30 ms.
        return httpx.Client(
            base_url=self.base_url, headers=headers, timeout=DEADLINE_S, verify=False
        )

    def admission(self, model: str, **rules: object) -> dict[str, object]:
        """Changes admission rules of a model's workers; returns the response. If no rules are
        given, returns the rules that have been changed."""
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        url = f"{self.base_url}/admin/admission"
        if rules:
            answer = httpx.post(url, json={"model": model, **rules}, headers=headers)
        else:
            answer = httpx.get(url, params={"model": model}, headers=headers)
        assert answer.status_code == 200, answer.text
        body: dict[str, object] = answer.json()
        return body

    def processes(self) -> list[int]:
        """All processes of this fleet, found by an environment variable that they inherit."""
        return list(marked(f"RAYFLEET_TEST={self.base_url}"))

    def ranks(self, worker: str, rank: int) -> set[int]:
        """Process ids of a worker's rank; there can be one that is exiting and one that is
        starting."""
        title = f"ray::Rank{rank}:{worker}".encode()
        found = set()
        for pid in self.processes():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title):
                    found.add(pid)
        return found

    def fronts(self) -> list[int]:
        """Process ids of the workers' replicas."""
        return self._replicas(b":worker-")

    def front(self, worker: str) -> int:
        """Process id of a worker's replica, found by its log file."""
        for pid in self.fronts():
            with contextlib.suppress(OSError):
                files = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
                if any(worker in Path(file).name for file in files):
                    return pid
        pytest.fail(f"worker {worker} has no replica")

    def gateways(self) -> list[int]:
        """Process ids of the gateways."""
        return self._replicas(b":gateway")

    def _replicas(self, deployment: bytes) -> list[int]:
        found = []
        for pid in self.processes():
            with contextlib.suppress(OSError):
                title = Path(f"/proc/{pid}/cmdline").read_bytes()
                if title.startswith(b"ray::ServeReplica:") and deployment in title:
                    found.append(pid)
        return found

    def ray(self) -> tuple[str, dict[str, str]]:
        """Address and environment for a process that joins the fleet's Ray cluster."""
        raylet = next(raylet for raylet in find_raylets() if raylet.pid in self.processes())
        settings = Path(f"/proc/{raylet.pid}/environ").read_bytes().split(b"\0")
        pairs = (os.fsdecode(setting).split("=", 1) for setting in settings if b"=" in setting)
        return raylet.gcs_address, dict(pairs)

    def index_blocks(self) -> dict[str, float]:
        """Number of blocks in the gateway's index by ready worker."""
        with self.http as http:
            text = http.get("/metrics").text
        series = r'^rayfleet_prefix_index_blocks{.*worker_id="(\w+)".*} (\S+)$'
        return {worker: float(n) for worker, n in re.findall(series, text, re.MULTILINE)}

    def check_runs(self) -> None:
        """Fails the test if the command has ended."""
        if self.process.poll() is not None:
            pytest.fail(f"rayfleet serve ended with {self.process.returncode}")

    def wait_ready(self, num_workers: int, timeout_s: float = DEADLINE_S) -> None:
        """Waits until all workers are ready."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.check_runs()
            with contextlib.suppress(httpx.TransportError):
                if len(self.index_blocks()) == num_workers:
                    return
            time.sleep(0.2)
        pytest.fail(f"rayfleet serve is not ready after {timeout_s} s")


def start_fleet(
    folder: Path, *arguments: str, stdout: int | None = None, installed: Path | None = None
) -> RunningFleet:
    """Starts `rayfleet serve` outside the source tree, with its API key in the environment.

    Args:
        folder: working directory.
        arguments: arguments of `rayfleet serve`.
        stdout: file descriptor for its standard output.
        installed: folder of executables with the `rayfleet` to run; None uses the source tree's.
    """
    port = free_ports(1)[0]
    base_url = f"http://127.0.0.1:{port}"
    environment = {
        **os.environ,
        "RAYFLEET_TEST": base_url,
        "RAYFLEET_API_KEY": API_KEY,
        "RAYFLEET_ADMIN_API_KEY": ADMIN_KEY,
    }
    command = [sys.executable, "-m", "cluster.cli.main"]
    if installed is not None:
        command = [str(installed / "rayfleet")]
        environment.pop("PYTHONPATH", None)
    kill_with_this_process(f"RAYFLEET_TEST={base_url}")
    process = subprocess.Popen(
        [*command, "serve", "--port", str(port), *arguments],
        cwd=folder,
        stdout=stdout,
        env=environment,
        start_new_session=True,
    )
    return RunningFleet(process, base_url)


def stop_fleet(fleet: RunningFleet) -> None:
    """Stops the fleet like Ctrl-C, and kills it on timeout."""
    if fleet.process.poll() is None:
        os.killpg(fleet.process.pid, signal.SIGINT)
    try:
        fleet.process.wait(timeout=DEADLINE_S)
    finally:
        for pid in fleet.processes():
            os.kill(pid, signal.SIGKILL)


def parent_of(pid: int) -> int:
    """Process id of a process's parent. Raises OSError if it has ended."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def models_of(tiny: Path, demo: Path | str, max_elastic: int = 3) -> list[dict[str, object]]:
    """Models of the fleet; the second one is autoscaled up to `max_elastic` workers, with short
    delays."""
    common = {"device": "cpu", "kv_cache_tokens": 8192}
    return [
        {
            **common,
            "model": str(tiny),
            "served_model_name": MODEL,
            "num_workers": 2,
            "tensor_parallel_size": 2,
            "batch_invariant": True,
        },
        {
            **common,
            "model": str(demo),
            "served_model_name": ELASTIC,
            "max_num_seqs": 2,
            "min_workers": 0,
            "max_workers": max_elastic,
            # Closed-loop clients never send more than the fleet serves, which is little on a busy
            # machine: any continuous load must require all of the workers.
            "target_load": 0.01,
            "upscale_delay_s": 0.5,
            "downscale_delay_s": 1.5,
            "downscale_to_zero_delay_s": 3,
        },
    ]


def wait_until(condition: Callable[[], object]) -> None:
    """Polls with increasing intervals, because each request takes the fleet's processes tens of
    milliseconds."""
    began = time.monotonic()
    pause_s = 0.05
    while not condition():
        assert time.monotonic() - began < DEADLINE_S, f"not so after {DEADLINE_S} s"
        time.sleep(pause_s)
        pause_s = min(1.4 * pause_s, 0.5)
