"""Start of a Ray cluster on this machine alone, or connection to a running one."""

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
"""Size of Ray's object store, which holds code and arguments of actors here, never tensors."""
HEAD_RESOURCE = "node:__internal_head__"
"""Resource that Ray gives to the head node alone; Serve places its controller by it, too."""


def init_local_ray(directory: Path, num_cpus: int | None = None) -> None:
    """Starts Ray on loopback. The environment must be set before, as `local_ray` does.

    Args:
        directory: the fleet's private directory, where Ray's files go, too.
        num_cpus: CPUs that Ray may hand out; as many as the machine has unless given.
    """
    import ray

    ray.init(
        address="local",  # without, it would join a cluster that `ray start` has begun here
        num_cpus=num_cpus,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level="error",
        _node_ip_address="127.0.0.1",
        _temp_dir=str(ray_directory(directory)),
    )


def join_ray(address: str) -> None:
    """Connects to a running cluster; `auto` is the one that RAY_ADDRESS names, or this machine's.

    Raises:
        ConnectionError: there is none.
    """
    import ray

    ray.init(address=address, log_to_driver=False, logging_level="error")


def haproxy_of_cluster() -> bool:
    """Whether Serve starts HAProxy on the cluster that has been joined.

    Serve's controller decides that by the environment of the head node, which a task reads there.
    """
    import ray

    look = ray.remote(num_cpus=0, resources={HEAD_RESOURCE: 0.001})(_haproxy_is_enabled)
    return bool(ray.get(look.remote()))


def node_addresses() -> set[str]:
    """IP addresses of the live nodes of the cluster that has been joined."""
    import ray

    return {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def proxy_warning(haproxy: bool, host: str, addresses: set[str]) -> str | None:
    """A warning about the proxies of a cluster that has been joined; None if all is well.

    Args:
        haproxy: whether the proxies are HAProxy.
        host: address that proxies and gateways listen on.
        addresses: IP addresses of the cluster's nodes.

    Raises:
        ValueError: gateways would listen on loopback, where HAProxy of other nodes reaches none.
    """
    if not haproxy:
        return (
            f"warning: this cluster has no HAProxy: {NO_HAPROXY}. It has where every `ray start` "
            'runs after eval "$(python -m cluster.environment)"'
        )
    if len(addresses) > 1 and host in ("127.0.0.1", "::1", "localhost"):
        raise ValueError(
            f"HAProxy of each of the {len(addresses)} machines connects to the gateways of all, "
            f"which --host {host} lets nobody do: give --host 0.0.0.0, and an --api-key-file"
        )
    return None


def _haproxy_is_enabled() -> bool:
    return os.environ.get(ENABLE_HAPROXY) == "1"


@contextmanager
def local_ray(num_cpus: int | None = None) -> Iterator[None]:
    """Context with a local Ray cluster: rayfleet's settings for Ray, a token of its own, and Ray
    Serve's default settings.

    Restores the environment on exit.

    Raises:
        RuntimeError: Ray was imported before; it would start without the token.
    """
    if "ray" in sys.modules:
        raise RuntimeError("the environment must be prepared before ray is imported")
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
