"""Ray pods as local processes.

A pod has its own network, file system and memory; a process does not. Only these settings differ
from what KubeRay would run:

- every port is a free one, and every listener is on the loopback interface (`RAY`);
- folders of the image and of volumes are replaced (`FOLDERS`), and models are those of the clone;
- Ray's workers do not run at nice 15, after all other processes of the machine;
- Ray does not monitor the machine's memory, and starts neither log monitors nor the autoscaler's
  monitor, which nothing here uses.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cluster.directories import private_directory
from cluster.launch import RAY_IS_SLOW
from cluster.ports import PortRange, free_ports
from tests.support.helm.kuberay import (
    AGENT_PORT,
    GCS_PORT,
    OPERATOR_TOKEN_HEADER,
    SERVE_PORT,
    RayPod,
)
from tests.support.paths import ROOT
from tests.support.reaper import kill_with_this_process, marked

MARK = "RAYFLEET_TEST_PODS"
"""Variable in the environment of all processes of a cluster; its value is the cluster's folder."""
START_TIMEOUT_S = 600.0
POLL_S = 0.25
STDOUT = "stdout"
"""File in a cluster's folder, in place of the standard output of all pods' first processes."""
FOLDERS = {
    # of the pod: of this machine; `{}` is the cluster's private folder
    "/opt/venv/bin": str(Path(sys.executable).parent),
    "/opt/rayfleet": str(ROOT),
    # Reuses the library that is already compiled for this machine's processor.
    "/tmp/rayfleet/cache": os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"),
    "/tmp/rayfleet": "{}/home",
    "/models": "{}/models",
    "/etc/rayfleet/api-keys": "{}/api-keys",
    "/proc/1/fd/1": f"{{}}/{STDOUT}",
}
IMAGE = {
    "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""Environment of `deploy/images/cpu.Dockerfile`; its WORKDIR is the clone."""


RAY = f"""#!{sys.executable}
import os, sys
from ray._private import services
services.get_node_ip_address = lambda address=None: "127.0.0.1"
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
from ray.scripts.scripts import main
sys.exit(main())
"""
"""Ray's command on the pods' PATH. Ray replaces loopback with the machine's external address unless
that variable is set; with it, Ray's own command rejects nodes that join, so it is only set for
processes that the command starts."""


class NotInTimeError(AssertionError):
    """Waiting timed out; the text has the last response."""


@dataclass(frozen=True)
class PodProcess:
    """A pod's Ray container, running."""

    pod: RayPod
    process: subprocess.Popen[bytes]
    ports: dict[str, str]
    """Ports on this machine, keyed by the pod's ports."""
    stats_port: int
    gateway_ports: PortRange
    log: Path

    def probe(self, kind: str) -> bool:
        """Whether the pod's probes succeed."""
        command = self.pod.probes[kind]
        for port, here in self.ports.items():
            command = [word.replace(f":{port}/", f":{here}/") for word in command]
        return subprocess.run(command, env=IMAGE, capture_output=True, check=False).returncode == 0

    @property
    def base_url(self) -> str:
        """Address to which the Service would send requests."""
        return f"http://127.0.0.1:{self.ports[SERVE_PORT]}"

    def haproxy_statistics(self) -> dict[str, dict[str, str]]:
        """HAProxy's statistics, per frontend and backend."""
        url = f"http://127.0.0.1:{self.stats_port}/stats;csv"
        with urllib.request.urlopen(url, timeout=30) as response:
            header, *rows = response.read().decode().lstrip("# ").splitlines()
        names = header.split(",")
        parsed = [dict(zip(names, row.split(","), strict=False)) for row in rows if row]
        totals = (row for row in parsed if row["svname"] in ("FRONTEND", "BACKEND"))
        return {row["pxname"]: row for row in totals}


@dataclass(frozen=True)
class PodCluster:
    """All pods of a RayService's cluster."""

    directory: Path
    token: str
    pods: list[PodProcess]
    dashboard_port: int
    begin: Callable[[RayPod], PodProcess]
    """Starts a pod's container."""

    @property
    def head(self) -> PodProcess:
        """The pod with Ray's control plane and Serve's controller."""
        return self.pods[0]

    @property
    def workers(self) -> list[PodProcess]:
        """All pods except the head; the Serve Service selects these."""
        return self.pods[1:]

    def operator(self, method: str, path: str, body: Any = None, token: str | None = "") -> Any:
        """Response of the dashboard to a request as KubeRay's operator sends it.

        Raises:
            OSError: the connection was refused, or the dashboard is not listening yet.
        """
        headers = {"Content-Type": "application/json"}
        if token is not None:
            headers[OPERATOR_TOKEN_HEADER] = f"Bearer {token or self.token}"
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.dashboard_port}{path}",
            method=method,
            headers=headers,
            data=None if body is None else json.dumps(body).encode(),
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                text = response.read().decode()
        except urllib.error.HTTPError as error:
            raise OSError(f"{error}: {error.read().decode()[-1500:]}") from error
        return json.loads(text) if text.startswith("{") else text

    def wait(
        self, what: str, holds: Callable[[], Any], gives_up: Callable[[], str] = lambda: ""
    ) -> None:
        """Waits until a condition holds, or `gives_up` returns why it never will.

        Raises:
            NotInTimeError: the condition did not hold in time.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        answer: object = None
        while time.monotonic() < deadline:
            try:
                if answer := holds():
                    return
            except OSError as error:
                answer = error
            ended = self._restart_pods()
            if reason := gives_up() or (ended and f"pods ended: {ended}"):
                raise NotInTimeError(f"{what}: {reason}\n{self.logs()}")
            time.sleep(POLL_S)
        raise NotInTimeError(f"{what}: {answer!r} after {START_TIMEOUT_S} s\n{self.logs()}")

    def _restart_pods(self) -> list[str]:
        """Restarts pods whose Ray started too slowly, as the kubelet would.

        Returns:
            Groups of other pods that ended.
        """
        ended = []
        for number, pod in enumerate(self.pods):
            if pod.process.poll() is None:
                continue
            if RAY_IS_SLOW in pod.log.read_text(errors="replace"):
                pod.gateway_ports.close()
                self.pods[number] = self.begin(pod.pod)
            else:
                ended.append(pod.pod.group)
        return ended

    def processes(self) -> Iterator[int]:
        """All processes that the pods have started."""
        return marked(f"{MARK}={self.directory}")

    def haproxies(self) -> list[int]:
        """Process ids of HAProxy."""
        found = []
        for pid in self.processes():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == "haproxy":
                    found.append(pid)
        return found

    def logs(self) -> str:
        """Output of the pods, and the ends of Serve's error logs."""
        logs = sorted(self.directory.glob("*.log"))
        logs += sorted(self.directory.glob("ray-*/session_2*/logs/serve/*.log"))
        ends = (f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)
        return "\n".join(ends)

    def stop(self) -> None:
        """Kills all processes, as at the end of a pod's grace period, and removes their folders."""
        while pids := list(self.processes()):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_S / 5)
            for pod in self.pods:
                pod.process.poll()  # else it stays as a zombie
        for pod in self.pods:
            pod.gateway_ports.close()
        for session in self.directory.glob("ray-*/session_2*"):
            # The workers' sockets, in a pod's own /tmp.
            shutil.rmtree(f"/tmp/rf-{os.getuid()}-{session.name}", ignore_errors=True)
        shutil.rmtree(self.directory, ignore_errors=True)


@contextmanager
def run_pods(pods: Iterable[RayPod], token: str) -> Iterator[PodCluster]:
    """Starts the head and, once its GCS responds, the other pods; kills all of them at the end."""
    directory = private_directory()
    (directory / "models").mkdir()
    (directory / "bin").mkdir()
    (directory / "bin" / "ray").write_text(RAY)
    (directory / "bin" / "ray").chmod(0o700)
    gcs_port, dashboard_port, client_port, *fallback_ports = free_ports(5)
    shared = {
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_ports[0]),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(fallback_ports[1]),
    }
    begin = partial(_start, directory=directory, gcs_port=gcs_port, shared=shared)
    cluster = PodCluster(directory, token, [], dashboard_port, begin)
    try:
        for pod in pods:
            if pod.is_head:
                pod = pod.with_start_parameters(
                    dashboard_host="127.0.0.1",
                    dashboard_port=str(dashboard_port),
                    port=str(gcs_port),
                    ray_client_server_port=str(client_port),
                    no_monitor="true",
                )
            else:
                pod = pod.with_start_parameters(address=f"127.0.0.1:{gcs_port}")
            cluster.pods.append(begin(pod))
            if pod.is_head:  # KubeRay's init container of the others waits for its GCS
                cluster.wait("the head", lambda: cluster.head.probe("readinessProbe"))
        yield cluster
    finally:
        cluster.stop()


def in_folders(text: str, directory: Path) -> str:
    """`text`, with a pod's folder at its start replaced by the folder on this machine."""
    for folder, here in FOLDERS.items():
        if text == folder or text.startswith(folder + "/"):
            return here.format(directory) + text.removeprefix(folder)
    return text


def listening_addresses(pid: int) -> set[tuple[str, int]]:
    """Addresses and TCP ports that a process listens on."""
    sockets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(entry))
    found = set()
    for table, family, size in (("tcp", socket.AF_INET, 4), ("tcp6", socket.AF_INET6, 16)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and f"socket:[{columns[9]}]" in sockets:
                address, port = columns[1].split(":")
                words = [bytes.fromhex(address)[i : i + 4][::-1] for i in range(0, size, 4)]
                found.add((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return found


def _start(pod: RayPod, directory: Path, gcs_port: int, shared: dict[str, str]) -> PodProcess:
    agent_port, metrics_port, serve_port, stats_port, exporter_port = free_ports(5)
    gateway_ports = PortRange()
    pod = pod.with_start_parameters(
        node_ip_address="127.0.0.1",
        temp_dir=str(directory / f"ray-{agent_port}"),
        dashboard_agent_listen_port=str(agent_port),
        metrics_export_port=str(metrics_port),
        include_log_monitor="false",
        # Other nodes on this machine would use the same ports.
        min_worker_port="0",
        max_worker_port="0",
    )
    side = directory / "haproxy"
    environment = {name: in_folders(v, directory) for name, v in pod.environment.items()}
    environment |= {
        **IMAGE,
        "PATH": f"{directory / 'bin'}:{IMAGE['PATH']}",
        **shared,
        MARK: str(directory),
        "RAY_ADDRESS": f"127.0.0.1:{gcs_port}",
        "RAY_PORT": str(gcs_port),
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_worker_niceness": "0",
        "RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(serve_port),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(exporter_port),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(side / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(side / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(side),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(side / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(side / "metrics.sock"),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(gateway_ports.first),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(gateway_ports.first + 99),
    }
    kill_with_this_process(f"{MARK}={directory}")
    log_file = directory / f"{pod.group}-{agent_port}.log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            pod.command,
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    ports = {AGENT_PORT: str(agent_port), GCS_PORT: str(gcs_port), SERVE_PORT: str(serve_port)}
    return PodProcess(pod, process, ports, stats_port, gateway_ports, log_file)
