"""A Serve deployment recovers from transient problems at startup, and fails on permanent ones.

As under KubeRay, the application is applied once, by `build_app`. One Ray cluster for all cases:
the folder of one model does not exist yet, a rank of another is killed during its start, the
checkpoint of a third is unsupported.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from cluster.config import find_demo_model
from cluster.launch import end_processes_of
from cluster.ports import free_ports
from tests.support.fleet.running_fleet import DEADLINE_S
from tests.support.paths import ROOT
from tests.support.worker.trace_collector import trace_collector

LATE, FRAGILE, HOPELESS = "late", "fragile", "hopeless"
OPTIONS = {"device": "cpu", "kv_cache_tokens": 2048, "cpu_threads": 1}


class Applications:
    """State reported by the process that runs the applications."""

    def __init__(self, process: subprocess.Popen[bytes], message: TextIO) -> None:
        self._process = process
        self._messages = message
        self.state: dict[str, Any] = {}

    def close(self) -> None:
        """Ends the process."""
        self._messages.close()

    def status(self, name: str) -> str:
        """Status of an application."""
        return str(self.state["applications"].get(name, [""])[0])

    def attempts(self, what: str) -> list[int]:
        """Number of failed attempts of each replica that waits to be retried."""
        return [attempts for name, attempts, _ in self.state["waiting"] if name == what]

    def is_reported(self, what: str, reason: str) -> bool:
        """Whether a replica reports that as the reason for waiting."""
        return any(name == what and reason in message for name, _, message in self.state["waiting"])

    def ranks(self) -> list[int]:
        """Process ids of all ranks 0."""
        return [pid for pid in self._processes() if _title(pid).startswith(b"ray::Rank0:")]

    def until(self, condition: Callable[[], bool], *, fails: str = "") -> None:
        """Waits until a condition holds, or the application `fails` has failed permanently."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            line = self._messages.readline()
            assert line, f"the applications' process has ended with {self._process.wait()}"
            self.state = json.loads(line)
            if condition():
                return
            if fails and self.status(fails) == "DEPLOY_FAILED":
                pytest.fail(f"{fails}: {self.state['applications'][fails][1]}")
        pytest.fail(f"still {self.state} after {DEADLINE_S:.0f} s")

    def kill_a_starting_rank(self) -> None:
        """Kills the first rank as soon as there is one."""
        deadline = time.monotonic() + DEADLINE_S
        while not (pids := self.ranks()):
            assert time.monotonic() < deadline, "no rank was started"
            time.sleep(0.01)
        os.kill(pids[0], signal.SIGKILL)

    def _processes(self) -> Iterator[int]:
        mark = f"RAYFLEET_RUNTIME_DIRECTORY={self.state['directory']}".encode()
        for entry in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in entry.read_bytes().split(b"\0"):
                    yield int(entry.parent.name)
            except OSError:
                continue


@contextmanager
def running(port: int, applications: dict[str, Any]) -> Iterator[Applications]:
    reading, writing = os.pipe()
    asked = json.dumps({"port": port, "applications": applications, "report": writing})
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.fleet.late_starts_app", asked],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        pass_fds=[writing],
        start_new_session=True,
    )
    os.close(writing)
    message = Applications(process, os.fdopen(reading))
    try:
        yield message
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(timeout=DEADLINE_S)
        finally:
            process.kill()
            message.close()
            if message.state:
                end_processes_of(Path(message.state["directory"]), grace_s=5.0)


@pytest.mark.long
def test_what_heals_serves_without_a_human_and_what_does_not_fails_with_the_reason(
    tmp_path: Path,
) -> None:
    demo = Path(find_demo_model())
    late, hopeless = tmp_path / "late", tmp_path / "hopeless"
    shutil.copytree(demo, hopeless)
    config = json.loads((hopeless / "config.json").read_text())
    (hopeless / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchLM"]}))
    models = [
        {"model": str(late), "served_model_name": LATE, **OPTIONS},
        {"model": str(demo), "served_model_name": FRAGILE, **OPTIONS},
    ]
    [port] = free_ports(1)
    with (
        trace_collector() as (traces_endpoint, traces),
        running(
            port,
            {
                "rayfleet": {"models": models, "otlp_traces_endpoint": traces_endpoint},
                HOPELESS: {"models": [{"model": str(hopeless), **OPTIONS}]},
            },
        ) as message,
    ):
        message.until(lambda: bool(message.state["applications"]))
        # The folder of the late model does not exist, so only the fragile one's rank can start.
        message.kill_a_starting_rank()
        message.until(lambda: bool(message.attempts(FRAGILE)), fails="rayfleet")
        assert message.is_reported(FRAGILE, "exited without an error")

        def both_have_tried_again() -> bool:
            return all(max(message.attempts(what), default=0) >= 2 for what in (LATE, "gateway"))

        message.until(both_have_tried_again, fails="rayfleet")
        assert message.is_reported(LATE, f"{late} does not exist")
        assert message.is_reported("gateway", f"{late} does not exist")
        assert message.status("rayfleet") == "DEPLOYING"
        command = [sys.executable, "-m", "cluster.starting"]
        environment = {**os.environ, **message.state["settings"]}
        shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert f"{late} does not exist" in shown.stdout

        # Like a mount point, and a copy into it: empty, then file by file, weights last.
        late.mkdir()
        message.until(lambda: message.is_reported(LATE, "has no config.json"), fails="rayfleet")
        shutil.copy(demo / "config.json", late)
        message.until(lambda: message.is_reported(LATE, "has no *.safetensors"), fails="rayfleet")
        shutil.copytree(
            demo, late, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors")
        )
        shutil.copy(demo / "model.safetensors", tmp_path)
        (tmp_path / "model.safetensors").rename(late / "model.safetensors")

        message.until(lambda: message.status("rayfleet") == "RUNNING", fails="rayfleet")
        message.until(lambda: httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200)
        assert message.state["waiting"] == [], "what is hopeless is not tried again"
        for model in (LATE, FRAGILE):
            body = {"model": model, "prompt": "What is 12 + 30?", "max_tokens": 4}
            url = f"http://127.0.0.1:{port}/v1/completions"
            answer = httpx.post(url, json=body, timeout=DEADLINE_S)
            assert answer.status_code == 200, answer.text

        message.until(lambda: message.status(HOPELESS) == "DEPLOY_FAILED")
        assert "NoSuchLM" in message.state["applications"][HOPELESS][1]

        # The endpoint was an argument: no process has a variable with it.
        message.until(lambda: {"gateway", "worker"} <= traced_processes(traces))


def traced_processes(bodies: list[bytes]) -> set[str]:
    """Kinds of processes that have sent spans."""
    requests = [ExportTraceServiceRequest.FromString(body) for body in bodies]
    return {
        attribute.value.string_value.split()[0]
        for request in requests
        for resource in request.resource_spans
        for attribute in resource.resource.attributes
        if attribute.key == "service.instance.id"
    }


def _title(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
