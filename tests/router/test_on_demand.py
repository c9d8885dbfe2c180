"""Models without a worker: requests wait for one started on demand, and the load report includes
them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from router.config import RoutingConfig
from router.serving import placing


async def start(rig, *, wait_s: float = 20.0, **options) -> None:
    """A gateway without workers, and workers that join step by step."""
    rig.transport.set_members_quietly()
    [route] = rig.config.models
    route = replace(route, on_demand=True, routing=RoutingConfig(no_worker_timeout_s=wait_s))
    await rig.start(attached=0, models=(route,), **options)


async def test_requests_wait_for_the_first_worker_and_are_counted(rig) -> None:
    await start(rig)
    model = rig.gateway.model("stub")
    idle = model.load.read()
    assert (idle.num_ready, idle.num_pending, idle.pending_s) == (0.0, 0.0, 0.0)
    works = [asyncio.create_task(rig.complete(f"{i} a prompt of its own")) for i in range(3)]
    await rig.until(lambda: model.stats.pending_requests == 3)
    load = model.load.read()
    assert (load.num_ready, load.num_pending, load.num_active) == (0.0, 3.0, 0.0)
    assert load.pending_s > 0.0
    rig.transport.set_members("w0")
    assert [(await work).status_code for work in works] == [200] * 3
    load = model.load.read()
    assert (load.num_ready, load.num_pending, load.pending_s) == (1.0, 0.0, 0.0)
    assert model.stats.unplaced == 0


async def test_the_gateway_is_ready_without_workers(rig) -> None:
    await start(rig)
    assert (await rig.client.get("/ready")).status_code == 200


async def test_they_wait_between_the_last_worker_and_the_next(rig) -> None:
    await start(rig)
    rig.transport.set_members("w0")
    assert (await rig.complete()).status_code == 200
    rig.transport.set_members()
    work = asyncio.create_task(rig.complete())
    await rig.until(lambda: rig.gateway.model("stub").stats.pending_requests == 1)
    rig.transport.set_members("w1")
    response = await work
    assert response.headers["x-rayfleet-worker"] == "w1"


async def test_they_do_not_wait_for_ever(rig) -> None:
    await start(rig, wait_s=0.05)
    response = await rig.complete()
    assert response.status_code == 503
    assert rig.gateway.model("stub").stats.pending_requests == 0


async def test_a_client_that_leaves_waits_no_more(rig) -> None:
    await start(rig)
    work = asyncio.create_task(rig.complete())
    stats = rig.gateway.model("stub").stats
    await rig.until(lambda: stats.pending_requests == 1)
    work.cancel()
    await rig.until(lambda: stats.pending_requests == 0)
    assert stats.finished["abort"] == 1


async def test_not_more_wait_than_may(rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "MAX_WAITING", 1)
    await start(rig)
    work = asyncio.create_task(rig.complete())
    await rig.until(lambda: rig.gateway.model("stub").stats.pending_requests == 1)
    assert (await rig.complete()).status_code == 503
    rig.transport.set_members("w0")
    assert (await work).status_code == 200


async def test_a_worker_that_leaves_while_its_stream_opens_is_never_chosen(rig) -> None:
    """The fleet registers it after it has been marked as draining."""
    await rig.start()
    model = rig.gateway.model("stub")
    first, second = rig.workers
    channel = model._channels[first.worker_id]
    channel.leaving = True  # the state while the snapshot is in flight
    model.on_snapshot(first.worker_id, first.snapshot())
    assert not model.fleet.worker(first.worker_id).ready
    assert (await rig.complete()).headers["x-rayfleet-worker"] == second.worker_id


async def test_traffic_of_a_hot_prefix_moves_when_its_worker_goes(rig) -> None:
    """Once it leaves the set, requests go to others, without hits that are not there."""
    rig.answer = "hello world, " * 8
    await rig.start(running=False)
    model = rig.gateway.model("stub")
    prompt = "the quick brown fox jumps over the lazy dog. " * 3

    async def finish(work: asyncio.Task):
        await rig.until(lambda: any(w.running for w in rig.workers))
        while not work.done():
            for worker in rig.workers:
                worker.step()
            await asyncio.sleep(0)
        return await work

    hot = (await finish(asyncio.create_task(rig.complete(prompt)))).headers["x-rayfleet-worker"]
    again = await finish(asyncio.create_task(rig.complete(prompt)))
    assert again.headers["x-rayfleet-worker"] == hot
    before = model.stats.hit_tokens
    assert before > 0
    [leaving] = [w for w in rig.workers if w.worker_id == hot]
    [other] = [w for w in rig.workers if w is not leaving]
    open_stream = asyncio.create_task(rig.complete(prompt))
    # A worker has a request before the gateway has counted it.
    await rig.until(lambda: bool(leaving.running) and model.stats.hit_tokens > before)
    expected = model.stats.hit_tokens
    rig.transport.set_members(other.worker_id)
    moved = asyncio.create_task(rig.complete(prompt))
    await rig.until(lambda: bool(other.running))
    while not (open_stream.done() and moved.done()):
        leaving.step()
        other.step()
        await asyncio.sleep(0)
    assert (await open_stream).headers["x-rayfleet-worker"] == hot
    assert (await moved).headers["x-rayfleet-worker"] == other.worker_id
    assert model.stats.hit_tokens == expected, "it was routed to no cache, and none was expected"
    await rig.until(lambda: hot not in model._channels)
    assert model.fleet.index.num_blocks(hot) == 0
    assert all(worker.worker_id != hot for worker in model.fleet.workers)
