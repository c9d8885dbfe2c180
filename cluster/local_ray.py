"""Starts a local Ray cluster, or connects to a running one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.directories import private_directory, ray_directory, remove_private_directory
from cluster.environment import (
    ENABLE_HAPROXY,
    NO_HAPROXY,
    local_ray_settings,
    ray_settings,
    require_authentication,
)

OBJECT_STORE_BYTES = 128 * 2**20
"""Size of Ray's object store in bytes. It stores code and arguments of actors, but no tensors."""
HEAD_RESOURCE = "node:__internal_head__"
"""Resource of the head node only, which Serve also uses to place its controller."""


def init_local_ray(directory: Path, num_cpus: int | None = None) -> None:
    """Starts Ray on loopback. The environment must already be set, as by `local_ray`.

    Args:
        directory: the fleet's private directory, which also contains Ray's files.
        num_cpus: number of CPUs for Ray to schedule; by default those of the machine.
    """
    import ray

    ray.init(
        address="local",  # otherwise it would join a cluster started by `ray start`
        num_cpus=num_cpus,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level="error",
        _node_ip_address="127.0.0.1",
        _temp_dir=str(ray_directory(directory)),
    )


def join_ray(address: str) -> None:
    """Connects to a running cluster; `auto` for RAY_ADDRESS, or this machine's cluster.

    Raises:
        ConnectionError: there is no such cluster.
    """
    import ray

    ray.init(address=address, log_to_driver=False, logging_level="error")


def haproxy_of_cluster() -> bool:
    """Whether Serve uses HAProxy on the connected cluster.

    It depends on the environment of the head node, which a task reads there.
    """
    import ray

    look = ray.remote(num_cpus=0, resources={HEAD_RESOURCE: 0.001})(_haproxy_is_enabled)
    return bool(ray.get(look.remote()))


def node_addresses() -> set[str]:
    """IP addresses of the alive nodes of the connected cluster."""
    import ray

    return {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def proxy_warning(haproxy: bool, host: str, addresses: set[str]) -> str | None:
    """A warning about the proxies of the connected cluster; None if there is nothing to warn about.

    Args:
        haproxy: whether the proxies are HAProxy.
        host: address that proxies and gateways listen on.
        addresses: IP addresses of the cluster's nodes.

    Raises:
        ValueError: gateways would listen on loopback, unreachable for HAProxy on other nodes.
    """
    if not haproxy:
        return (
            f"warning: this cluster does not use HAProxy: {NO_HAPROXY}. To enable HAProxy, run "
            'eval "$(python -m cluster.environment)" before every `ray start`'
        )
    if len(addresses) > 1 and host in ("127.0.0.1", "::1", "localhost"):
        raise ValueError(
            f"--host {host} is not supported on a cluster of {len(addresses)} nodes, since HAProxy "
            "connects to the gateways of all nodes: use --host 0.0.0.0 with --api-key-file"
        )
    return None


def _haproxy_is_enabled() -> bool:
    return os.environ.get(ENABLE_HAPROXY) == "1"


@contextmanager
def local_ray(num_cpus: int | None = None) -> Iterator[None]:
    """Context manager of a local Ray cluster: rayfleet's settings for Ray, a new token, and default
    settings of Ray Serve.

    Restores the environment on exit.

    Raises:
        RuntimeError: Ray is already imported, so that it would start without the token.
    """
    if "ray" in sys.modules:
        raise RuntimeError("ray is already imported: enter local_ray() before importing it")
    before = dict(os.environ)
    directory = private_directory()
    for name, value in (ray_settings() | local_ray_settings()).items():
        os.environ.setdefault(name, value)
    try:
        require_authentication(directory)
        init_local_ray(directory, num_cpus)
        yield
    finally:
        if "ray" in sys.modules:
            sys.modules["ray"].shutdown()
        os.environ.clear()
        os.environ.update(before)
        remove_private_directory(directory)
