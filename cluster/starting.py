"""Replicas that wait to retry a failed start: each publishes why, for `/ready` and for operators.

    python -m cluster.starting        # on a node of the cluster: one line per waiting replica

Entries are in Ray's key-value store, by the name of the replica's actor: gateways that start later
find them, and they are dropped once that actor is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, Final

import msgspec
import ray
from ray.exceptions import RayError
from ray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_get,
    _internal_kv_list,
    _internal_kv_put,
)

from worker.protocol.retry import StartDelay

NAMESPACE: Final = "rayfleet_starting"
SERVE_NAMESPACE: Final = "serve"
"""Ray's namespace of the actors that Serve starts."""


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """One replica that waits to retry its start."""

    what: str
    """The model of a worker, or `gateway`."""
    replica: str
    """Name of the replica's actor."""
    delay: StartDelay
    """Failed attempts so far, time of the next one, and reason."""

    def __str__(self) -> str:
        left_s = max(0.0, self.delay.next_try - time.time())
        tries = f"{self.delay.attempts} failed, next in {left_s:.0f} s"
        return f"{self.what} ({self.replica}): {tries}: {self.delay.reason}"


def tell(what: str, delay: StartDelay | None) -> None:
    """Publishes that this replica waits to retry its start; removes that where `delay` is None.

    While Ray's head is away nothing is published; the start does not depend on it.

    Args:
        what: the model of a worker, or `gateway`.
        delay: attempts and reason; None once the replica waits no more.
    """
    replica = ray.get_runtime_context().get_actor_name() or ""
    with contextlib.suppress(RayError):
        if delay is None:
            _internal_kv_del(replica, namespace=NAMESPACE)
            return
        waiting = Waiting(what=what, replica=replica, delay=delay)
        _internal_kv_put(replica, msgspec.json.encode(waiting), namespace=NAMESPACE)


def read() -> list[Waiting]:
    """All waiting replicas; blocks for a few milliseconds. Drops entries whose actor has ended."""
    found = []
    for key in sorted(_internal_kv_list("", namespace=NAMESPACE)):
        value = _internal_kv_get(key, namespace=NAMESPACE)
        if value is None:  # it has started meanwhile
            continue
        waiting = msgspec.json.decode(value, type=Waiting)
        try:
            ray.get_actor(waiting.replica, namespace=SERVE_NAMESPACE)
        except ValueError:
            _internal_kv_del(key, namespace=NAMESPACE)
        else:
            found.append(waiting)
    return found


async def delayed() -> list[dict[str, Any]]:
    """All waiting replicas in the form of the body of `/ready`."""
    return [
        {
            "name": waiting.what,
            "replica": waiting.replica,
            "failed_attempts": waiting.delay.attempts,
            "next_try": waiting.delay.next_try,
            "reason": waiting.delay.reason,
        }
        for waiting in await asyncio.to_thread(read)
    ]


if __name__ == "__main__":
    from cluster.local_ray import join_ray

    join_ray("auto")
    for waiting in read():
        print(waiting)
