"""A Ray cluster with several nodes on this machine, for checks that kill and restart nodes. Linux
only.

Each node is a raylet with its own processes. Nodes differ in their `resources`, which Serve uses
for placement. Clients reach the gateway at its own port, as through a load balancer, so that no
proxy fails together with a node.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from cluster.environment import Environment, prepare
from cluster.launch import APPLICATION, end_processes_of
from cluster.local_ray import OBJECT_STORE_BYTES, join_ray
from cluster.ports import PortRange, free_ports
from tests.support.fleet.processes import descendants

START_TIMEOUT_S = 300.0
_HOST = "127.0.0.1"
_POLL_S = 0.1
_NODE_CHECK = "RAY_health_check_period_ms"


class NodeCluster:
    """The cluster, from `start` to `stop`; as a context manager it calls both.

    Args:
        redis_server: path of the binary; if set, the head's state survives a restart of the head.
        node_check_ms: milliseconds between the head's health checks of a node.
    """

    def __init__(self, redis_server: str | None = None, *, node_check_ms: int = 3000) -> None:
        self._redis_server = redis_server
        self._node_check_ms = node_check_ms
        self._redis: subprocess.Popen[bytes] | None = None
        self._environment: Environment | None = None
        self._ports: PortRange | None = None
        self._cluster: Any = None
        self._head_arguments: dict[str, Any] = {}
        self.base_url = ""

    def start(self, **resources: float) -> None:
        """Starts the head with these resources."""
        self._ports = PortRange()
        port = self._ports.first
        self.base_url = f"http://{_HOST}:{port}"
        os.environ["RAY_SERVE_ENABLE_DIRECT_INGRESS"] = "1"
        os.environ["RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT"] = str(port)
        self._environment = prepare(host=_HOST, port=port, haproxy=False)
        # Ray stores the machine's current cluster there, which other processes must not find.
        os.environ["RAY_TMPDIR"] = str(self._environment.directory)
        os.environ[_NODE_CHECK] = str(self._node_check_ms)
        if self._redis_server is not None:
            self._start_redis(self._redis_server)
        from ray.cluster_utils import Cluster

        (gcs_port,) = free_ports(1)
        self._head_arguments = {"gcs_server_port": gcs_port, "resources": resources}
        self._cluster = Cluster(shutdown_at_exit=False)
        self._add(self._head_arguments)

    def add(self, **resources: float) -> Any:
        """Adds a node with these resources; returns its handle."""
        return self._add({"resources": resources})

    def kill(self, node: Any) -> None:
        """Kills a node with its processes."""
        self._cluster.remove_node(node, allow_graceful=False)

    def kill_head(self) -> None:
        """Kills the head: its raylet, Ray's control plane, Serve's controller."""
        self.kill(self._cluster.head_node)

    def restart_head(self) -> None:
        """Starts a head at the same address, with the state in Redis."""
        self._add(self._head_arguments)

    def deploy(self, args: Mapping[str, Any], deployments: Sequence[Mapping[str, Any]]) -> None:
        """Deploys like `serve deploy`; returns when everything is running.

        Raises:
            RuntimeError: the application did not start.
        """
        import ray
        from ray import serve
        from ray.serve.config import HTTPOptions
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        join_ray(self._cluster.address)
        (port,) = free_ports(1)
        serve.start(proxy_location="HeadOnly", http_options=HTTPOptions(host=_HOST, port=port))
        application = {
            "name": APPLICATION,
            "route_prefix": "/",
            "import_path": "cluster.app:build_app",
            "args": dict(args),
            "deployments": list(deployments),
        }
        _get_global_client().deploy_apps(ServeDeploySchema(applications=[application]))
        deadline = time.monotonic() + START_TIMEOUT_S
        while (status := serve.status().applications[APPLICATION]).status != "RUNNING":
            if time.monotonic() > deadline or status.status == "DEPLOY_FAILED":
                raise RuntimeError(f"the application is {status.status}: {status}")
            time.sleep(_POLL_S)
        # Running applications need no driver, and the head, which runs it, may be killed.
        ray.shutdown()

    def others(self) -> list[Any]:
        """All nodes except the head."""
        return list(self._cluster.worker_nodes)

    def ranks_on(self, node: Any) -> list[tuple[int, str]]:
        """Ranks on a node: (rank, worker id)."""
        raylet = node.all_processes["raylet"][0].process.pid
        commands = (command for _, command in descendants(raylet))
        found = (re.match(r"ray::Rank(\d+):(\w+)", command) for command in commands)
        return sorted((int(match[1]), match[2]) for match in found if match)

    def ready_workers(self) -> list[str]:
        """IDs of the gateway's ready workers; empty while the gateway is down."""
        try:
            with urllib.request.urlopen(f"{self.base_url}/metrics", timeout=5) as response:
                text = response.read().decode()
        except OSError:
            return []
        series = r'^rayfleet_prefix_index_blocks{.*worker_id="(\w+)".*} \S+$'
        return sorted(set(re.findall(series, text, re.MULTILINE)))

    def wait_workers(self, count: int, timeout_s: float = START_TIMEOUT_S) -> float:
        """Waits for this number of ready workers; returns the time taken in seconds.

        Raises:
            RuntimeError: it took longer than `timeout_s`.
        """
        began = time.monotonic()
        while len(ready := self.ready_workers()) != count:
            if time.monotonic() - began > timeout_s:
                raise RuntimeError(f"{count} workers were expected, ready are {ready}")
            time.sleep(_POLL_S)
        return time.monotonic() - began

    def stop(self) -> None:
        """Ends all started processes."""
        import ray

        ray.shutdown()
        if self._cluster is not None:
            for node in self._cluster.list_all_nodes():
                self._cluster.remove_node(node, allow_graceful=False)
        if self._environment is not None:
            end_processes_of(self._environment.directory, grace_s=2.0)
            self._environment.close()
        if self._ports is not None:
            self._ports.close()
        if self._redis is not None:
            self._redis.kill()
            self._redis.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _add(self, arguments: dict[str, Any]) -> Any:
        return self._cluster.add_node(
            num_cpus=2,
            node_ip_address=_HOST,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            **arguments,
        )

    def _start_redis(self, binary: str) -> None:
        assert self._environment is not None
        (port,) = free_ports(1)
        command = [binary, "--bind", _HOST, "--port", str(port), "--save", "", "--appendonly", "no"]
        command += ["--dir", str(self._environment.directory)]
        self._redis = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while not _listens(port) and self._redis.poll() is None:
            time.sleep(_POLL_S)
        os.environ["RAY_REDIS_ADDRESS"] = f"{_HOST}:{port}"


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((_HOST, port)) == 0


def find_redis() -> str | None:
    """Path of Debian's redis-server; None if it is not installed."""
    return shutil.which("redis-server")
