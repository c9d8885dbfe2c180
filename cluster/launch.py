"""Starts and stops a fleet on a local Ray cluster, or on a running one."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from cluster.config import ServeConfig
from cluster.directories import processes_of
from cluster.environment import Environment, prepare
from cluster.gcs import GcsSupervisor, can_restart_gcs, forget_gcs_state
from cluster.haproxy import CERTIFICATE_VARIABLE
from cluster.local_ray import (
    haproxy_of_cluster,
    init_local_ray,
    join_ray,
    node_addresses,
    proxy_warning,
)
from cluster.tls import NODES_SERVE_TLS, Certificate, check_certificate

APPLICATION = "rayfleet"
RAY_IS_SLOW = "timed out during startup"
"""Part of Ray's error message when its processes do not start in time."""
MAX_START_ATTEMPTS = 3
"""Maximum number of attempts to start Ray. Later ones are faster: the first spends most of its time
reading code into the page cache."""
Report = Callable[[str], None]


class LaunchError(RuntimeError):
    """The fleet failed to start; the last line of the message is the root cause."""


class LocalFleet:
    """A fleet started and stopped by this process; also a context manager.

    Args:
        config: configuration of the fleet.
        address: address of a running Ray cluster to join; None starts a local one.
        report: called with one line per startup phase.
        build: builds the Serve application, `build_application` by default; benchmarks replace the
            worker groups this way.
        haproxy: whether to use HAProxy; None to use it if installed.
    """

    def __init__(
        self,
        config: ServeConfig,
        *,
        address: str | None = None,
        report: Report = lambda line: None,
        build: Callable[[ServeConfig], Any] | None = None,
        haproxy: bool | None = None,
    ) -> None:
        self._config = config
        self._address = address
        self._report = report
        self._build = build
        self._haproxy = haproxy
        self._environment: Environment | None = None
        self._certificate: Certificate | None = None
        self._gcs: GcsSupervisor | None = None
        self._has_deployed = False

    @property
    def base_url(self) -> str:
        """URL of the endpoint for clients on this machine."""
        host = self._config.endpoint.host
        shown = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
        scheme = "https" if self._config.endpoint.ssl_certfile else "http"
        return f"{scheme}://{shown}:{self._config.endpoint.port}"

    @property
    def log_directory(self) -> str:
        """Folder with Ray's logs of all processes of this fleet. It is removed when the fleet
        stops; after a failed start, it is kept until a later start finds the logs of a more recent
        fleet."""
        from ray._private.worker import _global_node

        return str(_global_node.get_logs_dir_path())

    def start(self) -> None:
        """Starts the fleet; returns when its gateways and initial workers run and the endpoint is
        ready for requests.

        Raises:
            ValueError: the configuration is not supported on this machine or cluster.
            LaunchError: a replica failed to start, or the endpoint did not become ready.
        """
        endpoint = self._config.endpoint
        if endpoint.ssl_certfile:
            if self._address is not None:
                raise ValueError(NODES_SERVE_TLS)
            check_certificate(endpoint.ssl_certfile, endpoint.ssl_keyfile)
        require_free_port(endpoint.host, endpoint.port)
        self._environment = prepare(
            host=endpoint.host,
            port=endpoint.port,
            haproxy=self._haproxy,
            local=self._address is None,
        )
        self._prepare_certificate()
        os.environ["RAYFLEET_LOG_FORMAT"] = endpoint.log_format
        os.environ["RAYFLEET_LOG_LEVEL"] = endpoint.log_level
        try:
            self._start_ray()
            self._start_proxies()
            self._deploy()
            self._wait_ready()
        except BaseException:
            self.stop(keep_logs=True)
            raise

    def update(self, config: ServeConfig) -> None:
        """Replaces all gateways and workers with those of `config`, with the same host and port.

        Returns when the new ones are running; old ones may still be finishing streams.

        Raises:
            LaunchError: a new replica failed to start; the old ones keep serving.
        """
        self._config = config
        self._deploy()

    def refresh_certificate(self) -> None:
        """Reloads the TLS certificate files if they were renewed; reports the result."""
        if self._certificate is None:
            return
        try:
            if self._certificate.refresh():
                self._report("renewed TLS certificate loaded")
        except ValueError as error:
            self._report(f"renewed TLS certificate not loaded, keeping the old one: {error}")

    def stop(self, *, keep_logs: bool = False) -> None:
        """Stops the fleet and, for a local cluster, all of its processes, and removes the fleet's
        files; `keep_logs` keeps Ray's logs."""
        import ray

        environment, self._environment = self._environment, None
        if environment is None:
            return
        started = ray.is_initialized()
        if started:
            if self._address is not None and self._has_deployed:
                from ray import serve

                serve.delete(APPLICATION)
            if self._gcs is not None:
                self._gcs.stop()
            ray.shutdown()
        # After an interrupted start there are processes that ray.shutdown does not stop.
        end_processes_of(environment.directory, grace_s=5.0 if started else 0.2)
        environment.close(keep_logs=keep_logs)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _prepare_certificate(self) -> None:
        """Sets the TLS certificate for HAProxy's wrapper, which is started by Ray's processes."""
        endpoint, environment = self._config.endpoint, self._environment
        assert environment is not None
        os.environ.pop(CERTIFICATE_VARIABLE, None)
        if endpoint.ssl_certfile and environment.haproxy:
            self._certificate = Certificate(
                endpoint.ssl_certfile, endpoint.ssl_keyfile, environment.directory
            )
            os.environ[CERTIFICATE_VARIABLE] = str(self._certificate.bundle)

    def _start_ray(self) -> None:
        if self._address is not None:
            join_ray(self._address)
        else:
            assert self._environment is not None
            start_local_ray(
                self._environment.directory,
                max(os.cpu_count() or 1, self._num_cpus_reserved()),
                self._report,
            )
            if can_restart_gcs():
                self._gcs = GcsSupervisor()
        self._report("Ray is up")

    def _start_proxies(self) -> None:
        from ray import serve
        from ray.exceptions import RayActorError
        from ray.serve.config import HTTPOptions

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        assert self._environment is not None
        host, port = self._environment.serve_host, self._config.endpoint.port
        haproxy = self._environment.haproxy
        if self._address is not None:
            haproxy = haproxy_of_cluster()
            if (warning := proxy_warning(haproxy, host, node_addresses())) is not None:
                self._report(warning)
        options: dict[str, Any] = {"host": host, "port": port}
        endpoint = self._config.endpoint
        if endpoint.ssl_certfile and not haproxy:
            options |= {
                "ssl_certfile": endpoint.ssl_certfile,
                # Serve requires both; one file may contain both.
                "ssl_keyfile": endpoint.ssl_keyfile or endpoint.ssl_certfile,
            }
        try:
            serve.start(
                http_options=HTTPOptions(**options),
                logging_config={"enable_access_log": False},
            )
        except (RayActorError, TimeoutError) as error:
            # Serve itself is running, and its controller keeps trying to start proxies.
            self._report(f"Ray Serve's proxy is not up yet: {str(error).splitlines()[0]}")
        proxy = "HAProxy" if haproxy else "Python proxy"
        self._report(f"Ray Serve is up ({proxy})")

    def _deploy(self) -> None:
        """Deploys the application; reports the number of ready workers until it is RUNNING.

        Raises LaunchError if the deployment fails.
        """
        from ray import serve

        from cluster.app import build_application

        application = (self._build or build_application)(self._config)
        self._has_deployed = True
        try:
            serve.run_many(
                [serve.RunTarget(application, name=APPLICATION)],
                wait_for_ingress_deployment_creation=False,
                wait_for_applications_running=False,
            )
        except TimeoutError as error:
            # The application is deployed, and the controller replaces proxies that hang.
            self._report(f"Ray Serve's proxy does not respond: {error}")
        reported: dict[str, int] = {}
        while (overview := serve.status().applications[APPLICATION]).status != "RUNNING":
            if overview.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                messages = [deployment.message for deployment in overview.deployments.values()]
                raise LaunchError(root_cause_last("\n".join([overview.message, *messages])))
            self._report_ready_workers(overview.deployments, reported)
            time.sleep(0.1)
        self._report_ready_workers(overview.deployments, reported)

    def _report_ready_workers(self, deployments: Any, reported: dict[str, int]) -> None:
        for model in self._config.models:
            if model.deployment not in deployments:
                continue
            running = int(deployments[model.deployment].replica_states.get("RUNNING", 0))
            if running > reported.get(model.name, 0):
                reported[model.name] = running
                self._report(f"{model.name}: {running} of {model.min_workers} worker(s) ready")

    def _wait_ready(self, timeout_s: float = 60) -> None:
        """Waits until /ready of the endpoint succeeds. Raises LaunchError after `timeout_s`
        seconds."""
        deadline = time.monotonic() + timeout_s
        problem = "no response"
        # The certificate is for the name that clients use, not for the loopback address.
        unverified = ssl._create_unverified_context()
        while time.monotonic() < deadline:
            try:
                url = f"{self.base_url}/ready"
                with urllib.request.urlopen(url, timeout=5, context=unverified):
                    return
            except urllib.error.HTTPError as error:
                problem = f"HTTP {error.code}"
            except OSError as error:
                problem = str(getattr(error, "reason", error))
            time.sleep(0.05)
        raise LaunchError(
            f"{self.base_url}/ready did not return 200 within {timeout_s:g} s: {problem}"
        )

    def _num_cpus_reserved(self) -> int:
        ranks = sum(m.max_workers * m.engine.tensor_parallel_size for m in self._config.models)
        # Each reserves 0.1 CPU; twice, as rolling updates start new ones before old ones stop.
        return 2 * (ranks + self._config.endpoint.gateway_limit) // 10 + 1


def require_free_port(host: str, port: int) -> None:
    """Raises ValueError if this machine cannot listen on the port, for example if it is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(
                f"cannot listen on {host}:{port} ({error.strerror}): use another --port, or check "
                "--host"
            ) from error


def root_cause_last(text: str) -> str:
    """`text` with the line of the root cause, the last that names an error, repeated at the end."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)  # Ray colors parts of its messages
    lines = [line for line in text.strip().splitlines() if line.strip()]
    named = ("Error: ", "RankFailure: ", "Unavailable: ")
    causes = [line for line in lines if any(name in line for name in named)]
    return "\n".join([*lines, "", causes[-1].strip()]) if causes else text


def start_local_ray(directory: Path, num_cpus: int, report: Callable[[str], None]) -> None:
    """Starts Ray, up to MAX_START_ATTEMPTS times if it times out on a busy machine.

    Ray waits 30 s for its processes, which is not configurable, and then leaves them running.

    Args:
        directory: the fleet's private directory.
        num_cpus: number of CPUs for Ray to schedule.
        report: called with a line before each retry.
    """
    for attempts_left in reversed(range(MAX_START_ATTEMPTS)):
        try:
            init_local_ray(directory, num_cpus)
            return
        except Exception as error:  # Ray raises no other type
            if RAY_IS_SLOW not in str(error) or not attempts_left:
                raise
        report("Ray did not start within 30 s: retrying")
        end_processes_of(directory, grace_s=0.0)
        forget_gcs_state(directory)


def end_processes_of(directory: Path, grace_s: float) -> None:
    """Waits `grace_s` seconds for the processes of a local cluster to end, then kills the rest.

    They are identified by the cluster's private `directory` in their environment.
    """
    deadline = time.monotonic() + grace_s
    while pids := processes_of(directory):
        if time.monotonic() > deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.05)
