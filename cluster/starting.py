"""Replicas that wait to retry a failed start, published for `/ready` and for operators.

    python -m cluster.starting        # on a node of the cluster: prints a line per waiting replica

Entries are in Ray's key-value store by the replica's actor name, so that gateways that start later
can read them. An entry is removed once its actor has ended.
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

from worker.protocol.analyzed import analyzed
from worker.protocol.retry import StartDelay

NAMESPACE: Final = "rayfleet_starting"
SERVE_NAMESPACE: Final = "serve"
"""Ray namespace of Serve's actors."""


class Waiting(msgspec.Struct, frozen=True, kw_only=True, rename={"name": "what"}):
    """A replica that is waiting to retry its start."""

    name: str
    """Model of a worker, or `gateway`; stored as `what` for compatibility with other versions."""
    replica: str
    """Name of the replica's actor."""
    delay: StartDelay
    """Number of failed attempts, time of the next one, and reason."""

    def __str__(self) -> str:
        left_s = max(0.0, self.delay.next_try - time.time())
        attempts = f"{self.delay.attempts} failed attempts, next in {left_s:.0f} s"
        return f"{self.name} ({self.replica}): {attempts}: {self.delay.reason}"


def publish(name: str, delay: StartDelay | None) -> None:
    """Publishes that this replica is waiting to retry its start; removes the entry if `delay` is
    None.

    Nothing is published while Ray's head is unavailable; the start does not depend on it.

    Args:
        name: model of a worker, or `gateway`.
        delay: attempts and reason; None when the replica no longer waits.
    """
    replica = ray.get_runtime_context().get_actor_name() or ""
    with contextlib.suppress(RayError):
        if delay is None:
            _internal_kv_del(replica, namespace=NAMESPACE)
            return
        waiting = Waiting(name=name, replica=replica, delay=delay)
        _internal_kv_put(replica, msgspec.json.encode(waiting), namespace=NAMESPACE)


def read() -> list[Waiting]:
    """All waiting replicas; blocks for a few milliseconds. Removes entries of ended actors."""
    found = []
    for key in sorted(_internal_kv_list("", namespace=NAMESPACE)):
        value = _internal_kv_get(key, namespace=NAMESPACE)
        if value is None:  # started in the meantime
            continue
        waiting = msgspec.json.decode(value, type=analyzed(Waiting))
        try:
            ray.get_actor(waiting.replica, namespace=SERVE_NAMESPACE)
        except ValueError:
            _internal_kv_del(key, namespace=NAMESPACE)
        else:
            found.append(waiting)
    return found


async def delayed() -> list[dict[str, Any]]:
    """All waiting replicas, in the format of the `/ready` response."""
    return [
        {
            "name": waiting.name,
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
