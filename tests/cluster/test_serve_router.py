"""FleetRouter alone, and in a small Serve application."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import (
    DeploymentHandleSource,
    ReplicaID,
    RequestMetadata,
)
from ray.serve.request_router import PendingRequest

from cluster.serve_router import FleetRouter
from tests.support.cluster.serve_replica import DEPLOYMENT, Replica


class Rig:
    def __init__(self, num_replicas: int, **settings: Any) -> None:
        self.router = FleetRouter(
            deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.REPLICA
        )
        self.router.initialize_state(**settings)
        # Calls are sequential, but almost at the same time: a loaded machine would spread a burst,
        # and replicas would differ by how long they have waited.
        self.router._fleet._clock = partial(next, count(0.0, 1e-6))
        self.replicas = [Replica(f"r{number}") for number in range(num_replicas)]
        self.router.update_replicas(self.replicas)
        self.num_requests = 0

    async def route(self, *args: Any, **kwargs: Any) -> tuple[str, str]:
        """Replica and request ID of a call."""
        pending, replica = await self.place(*args, **kwargs)
        self.router.on_request_routed(pending, replica, None)
        return replica.unique_id, pending.metadata.internal_request_id

    async def place(self, *args: Any, **kwargs: Any) -> tuple[PendingRequest, ReplicaID]:
        """A call and the replica chosen for it."""
        self.num_requests += 1
        name = f"q{self.num_requests}"
        metadata = RequestMetadata(request_id=name, internal_request_id=name)
        pending = PendingRequest(args=list(args), kwargs=kwargs, metadata=metadata)
        return pending, (await self.router._choose_replica_for_request(pending)).replica_id

    @property
    def num_running(self) -> list[int]:
        """Running calls by replica."""
        return [cache.load().num_running for cache in self.router._caches.values()]

    def complete(self, replica: str, name: str) -> None:
        self.router.on_request_completed(ReplicaID(replica, DEPLOYMENT), name)


async def test_conversations_are_routed_to_their_prefix() -> None:
    rig = Rig(4)
    homes = {}
    for talk in range(8):
        homes[talk] = await rig.route({"prompt": f"talk {talk}: " + "word " * 400})
        rig.complete(*homes[talk])
    assert len({home for home, _ in homes.values()}) == 4
    for talk in (5, 2, 7, 0):
        replica, name = await rig.route({"prompt": f"talk {talk}: " + "word " * 400 + "more"})
        assert replica == homes[talk][0]
        rig.complete(replica, name)


async def test_a_burst_is_routed_to_the_prompt_being_computed() -> None:
    rig = Rig(4)
    text = "a long document " * 2000
    placed = [await rig.route(SimpleNamespace(prompt=text + str(n))) for n in range(6)]
    assert len({replica for replica, _ in placed}) == 1


async def test_messages_and_texts_are_prompts_and_other_calls_are_spread() -> None:
    rig = Rig(2)
    chat = [{"role": "user", "content": [{"type": "text", "text": "word " * 400}]}]
    first = await rig.route(messages=chat)
    rig.complete(*first)
    again = await rig.route({"messages": chat})
    assert again[0] == first[0]
    rig.complete(*again)
    replicas: Counter[str] = Counter()
    for _ in range(8):
        replica, name = await rig.route(1, 2)
        replicas[replica] += 1
        # While a call is open, real time determines whether its prompt has been computed.
        rig.complete(replica, name)
    assert set(replicas.values()) == {4}


async def test_a_call_that_finishes_before_it_is_routed_does_not_count_as_running() -> None:
    """Serve reports the end in a callback, and the acceptance in a task."""
    rig = Rig(1)
    pending, replica = await rig.place("word " * 400)
    rig.complete(replica.unique_id, pending.metadata.internal_request_id)
    rig.router.on_request_routed(pending, replica, None)
    assert rig.num_running == [0]


async def test_a_rejected_call_does_not_finish_others() -> None:
    rig = Rig(1)
    taken, name = await rig.route("word " * 400)
    refused, replica = await rig.place("other " * 400)
    rig.complete(replica.unique_id, refused.metadata.internal_request_id)
    assert rig.num_running == [1]
    rig.complete(taken, name)
    assert rig.num_running == [0]
    assert not rig.router._placed
    assert not rig.router._open


async def test_least_recently_used_blocks_are_evicted() -> None:
    rig = Rig(1, cache_tokens=256)
    for text in ("a" * 800, "b" * 800):
        rig.complete(*await rig.route(text))
    assert rig.router._fleet.index.num_blocks("r0") == 16


async def test_a_removed_replica_gets_no_calls() -> None:
    rig = Rig(2)
    replica, name = await rig.route("word " * 400)
    rig.complete(replica, name)
    rig.router.update_replicas([r for r in rig.replicas if r.replica_id.unique_id != replica])
    other, name = await rig.route("word " * 400)
    assert other != replica
    rig.complete(other, name)
    await asyncio.sleep(0)
    assert not rig.router._placed
    assert len(rig.router._fleet.in_flight) == 0


async def test_invalid_settings_are_rejected() -> None:
    with pytest.raises(ValueError, match="unknown routing policy"):
        Rig(1, routing_policy="best")
    with pytest.raises(ValueError, match="cache_tokens at least 16"):
        Rig(1, cache_tokens=0)
