"""Simulated router that calls Ray Serve LLM's PrefixCacheAffinityRouter, from package `ray`.

The routing loop, prefix tree, queue lengths and power of two choices are Ray's own. Replicas are
simulated, and the prefix tree, which is an actor in Ray, is called directly. Each token id becomes
one character of the prompt.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router as ray_router
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve._private.request_router.common import PendingRequest

from deploy.benchmarks.routing.simulated import Clock, Placement, SimulatedRouter
from deploy.benchmarks.routing.worker import SimWorker
from deploy.benchmarks.routing.workload import Arrival
from worker.protocol.messages import StepReport, Submit

_DEPLOYMENT = DeploymentID(name="workers", app_name="simulated")
_MAX_ONGOING = 10**9
"""Maximum number of ongoing requests per worker; Ray Serve LLM sets no lower limit."""


class RayPrefixRouter(SimulatedRouter):
    """Router that uses Ray Serve LLM's PrefixCacheAffinityRouter.

    Args:
        clock: clock of the simulation.
        seed: seed of the router's random choices.
        settings: `request_router_kwargs`; empty uses Ray's defaults.
    """

    def __init__(self, clock: Clock, seed: int, settings: dict[str, float]) -> None:
        self._clock = clock
        self._loop = asyncio.new_event_loop()
        # The router uses the global random generator, and calls `ray.get` on results of its tree.
        self._random_state = random.getstate()
        random.seed(seed)
        self._ray = ray_router.ray
        ray_router.ray = SimpleNamespace(get=lambda answer: answer)
        self._replicas: dict[str, _Replica] = {}
        self._incarnations: Counter[str] = Counter()
        self._open: dict[str, str] = {}
        self._router = self._loop.run_until_complete(self._create(settings))

    def joined(self, worker: SimWorker) -> None:
        """Adds a worker that has started, or whose attach stream was reopened."""
        if worker.worker_id not in self._replicas:
            self._incarnations[worker.worker_id] += 1
            number = self._incarnations[worker.worker_id]
            self._replicas[worker.worker_id] = _Replica(worker, number)
            self._members_changed()

    def lost(self, worker: SimWorker) -> None:
        """Removes a worker that failed or left. Ignores broken attach streams, which this router
        does not use."""
        if not worker.up or worker.draining:
            self._replicas.pop(worker.worker_id, None)
            self._members_changed()

    def place(self, arrivals: Sequence[Arrival]) -> list[Placement | None]:
        """Chooses workers for requests that arrive at the same time."""
        if not self._replicas:
            return [None] * len(arrivals)
        return self._loop.run_until_complete(self._choose(arrivals))

    def submitted(self, worker: SimWorker, submit: Submit, ordinal: int) -> None:
        """Records that a request was sent to its worker as that worker's request number
        `ordinal`."""
        self._open[submit.request_id] = worker.worker_id

    def reported(self, worker: SimWorker, report: StepReport) -> None:
        """Does nothing, as Serve receives no step reports."""

    def ended(self, worker_id: str, request_id: str) -> None:
        """Records that a request or its worker has ended."""
        replica = self._replicas.get(self._open.pop(request_id, ""))
        if replica is not None:
            self._router.decrement_queue_len_cache(replica.replica_id)

    def close(self) -> None:
        """Releases the router's resources after the simulation."""
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()
        ray_router.ray = self._ray
        random.setstate(self._random_state)

    async def _create(self, settings: dict[str, float]) -> Any:
        router = ray_router.PrefixCacheAffinityRouter(
            deployment_id=_DEPLOYMENT,
            handle_source=DeploymentHandleSource.REPLICA,
            use_replica_queue_len_cache=True,
            get_curr_time_s=self._clock,
        )
        router.initialize_state(tree_actor=_TreeActor(), **settings)
        return router

    async def _choose(self, arrivals: Sequence[Arrival]) -> list[Placement | None]:
        return [Placement(await self._choose_one(arrival)) for arrival in arrivals]

    async def _choose_one(self, arrival: Arrival) -> str:
        text = arrival.tokens.decode("utf-32-le", "surrogatepass")
        pending = PendingRequest(
            args=[SimpleNamespace(prompt=text)],
            kwargs={},
            metadata=RequestMetadata(
                request_id=arrival.request_id, internal_request_id=arrival.request_id
            ),
            created_at=self._clock(),
        )
        replica = await self._router._choose_replica_for_request(pending)
        self._router.on_send_request(replica.replica_id)
        self._router.on_request_routed(pending, replica.replica_id, None)
        return str(replica.worker_id)

    def _members_changed(self) -> None:
        async def update() -> None:
            self._router.update_replicas(list(self._replicas.values()))
            await asyncio.sleep(0)

        self._loop.run_until_complete(update())


class _Replica:
    """Interface of a replica for a router."""

    node_id = "node"
    availability_zone = None
    multiplexed_model_ids: frozenset[str] = frozenset()
    max_ongoing_requests = _MAX_ONGOING

    def __init__(self, worker: SimWorker, incarnation: int) -> None:
        self.worker_id = worker.worker_id
        self.replica_id = ReplicaID(f"{worker.worker_id}-{incarnation}", _DEPLOYMENT)
        self._worker = worker

    async def get_queue_len(self, *, deadline_s: float) -> int:
        """Number of the worker's unfinished requests."""
        return len(self._worker.open)


class _TreeActor:
    """Ray's tree behind the interface of an actor handle."""

    def __init__(self) -> None:
        self._tree = PrefixTree()

    def __getattr__(self, name: str) -> SimpleNamespace:
        method: Callable[..., Any] = getattr(self._tree, name)
        return SimpleNamespace(remote=method)
