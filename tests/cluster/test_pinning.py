"""Calls to a given worker that is running or has stopped."""

from __future__ import annotations

import asyncio

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
from ray.serve._private.request_router.common import PendingRequest

from cluster.pinning import PinnedRouter
from cluster.workers import WORKERS
from tests.support.cluster.serve_replica import Replica

DEPLOYMENT = DeploymentID("pinned", "app")


@pytest.fixture
async def router() -> PinnedRouter:
    router = PinnedRouter(deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.REPLICA)
    router.initialize_state()
    router.update_replicas([Replica("r0"), Replica("r1")])
    return router


def call(worker_id: str) -> PendingRequest:
    metadata = RequestMetadata(request_id=worker_id, internal_request_id=worker_id)
    return PendingRequest(args=[], kwargs={"worker_id": worker_id}, metadata=metadata)


async def test_a_call_is_sent_to_the_given_worker(router: PinnedRouter) -> None:
    for name in ("r1", "r0"):
        replica = await router._choose_replica_for_request(call(name))
        assert replica.replica_id.unique_id == name
    assert WORKERS["pinned"].ids == ("r0", "r1")


async def test_a_call_to_a_dead_worker_does_not_block_the_loop(
    router: PinnedRouter,
) -> None:
    """Serve retries: without a pause in between the gateway would hang."""
    [dead] = [r.replica_id for r in router.curr_replicas.values() if r.replica_id.unique_id == "r1"]
    router.on_replica_actor_died(dead)
    assert WORKERS["pinned"].ids == ("r0",)
    lost = asyncio.create_task(router._choose_replica_for_request(call("r1")))
    for _ in range(5):
        await asyncio.sleep(0.01)
    assert not lost.done()
    replica = await router._choose_replica_for_request(call("r0"))
    assert replica.replica_id.unique_id == "r0"
    lost.cancel()
    await asyncio.wait([lost])
