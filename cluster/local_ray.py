"""The one place that starts Ray, on this machine alone, or joins a cluster that there is."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.environment import (
    local_ray_settings,
    private_directory,
    ray_settings,
    require_authentication,
)

OBJECT_STORE_BYTES = 128 * 2**20
"""Ray's object store holds code and arguments of actors here, never tensors."""


def init_local_ray(num_cpus: int | None = None) -> None:
    """Starts Ray on loopback. The environment has been set before, as `local_ray` does.

    Args:
        num_cpus: that it may give away; as many as the machine has unless given.
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
    )


def join_ray(address: str) -> None:
    """Connects to a running cluster; `auto` is the one that RAY_ADDRESS names, or this machine's.

    Raises:
        ConnectionError: there is none.
    """
    import ray

    ray.init(address=address, log_to_driver=False, logging_level="error")


@contextmanager
def local_ray(num_cpus: int | None = None) -> Iterator[None]:
    """Ray with our settings, a token of its own, and Ray Serve's defaults.

    The environment is as it was before when it ends.

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
        init_local_ray(num_cpus)
        yield
    finally:
        if "ray" in sys.modules:
            sys.modules["ray"].shutdown()
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(directory, ignore_errors=True)
