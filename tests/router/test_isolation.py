"""A request that crashes every worker that accepts it, and the requests beside it."""

from __future__ import annotations

import asyncio

import pytest

from router.config import RoutingConfig
from router.serving import isolation
from tests.support.router.stub_worker import StubWorker

NUM_INNOCENT = 8
LONG = "the quick brown fox jumps over the lazy dog, hello there. " * 4


class FragileWorker(StubWorker):
    """Crashes on a prompt that contains POISON, at a given moment, and is replaced at once."""

    moment = "front"
    beside: list[int]
    """Number of other requests at each crash."""

    async def submit(self, payload: bytes) -> bytes:
        if self.moment == "front" and POISON in payload:
            self.die()
            raise ConnectionError("the front is gone")
        return await super().submit(payload)

    def step(self) -> None:
        poison = [r for r in self.running.values() if POISON in r.submit.prompt]
        if self.moment != "front" and poison:
            drawn = len(self.script(poison[0].submit)) - len(poison[0].left)
            if drawn >= (0 if self.moment == "first step" else 3):
                self.die()
                return
        super().step()

    def die(self) -> None:
        others = [r for r in self.running.values() if POISON not in r.submit.prompt]
        self.beside.append(len(others))
        if self.moment == "front":
            self.running.clear()
            self.num_submits = 0
            self.epoch += 1
            self.send(ConnectionError("the stream broke"))
        else:
            self.crash()
            self.send(self.snapshot())


POISON = b"\x07\x00\x00\x00" * 8


def use_fragile(rig, moment: str) -> list[int]:
    deaths: list[int] = []
    for worker in rig.workers:
        worker.__class__ = FragileWorker
        worker.moment, worker.beside = moment, deaths
    rig.answer = LONG
    return deaths


@pytest.mark.parametrize("moment", ["front", "first step", "third token"])
@pytest.mark.parametrize("n", [1, 3])
async def test_only_the_one_that_ends_workers_is_given_up(rig, events, moment, n):
    deaths = use_fragile(rig, moment)
    await rig.start()
    others = [
        asyncio.create_task(rig.complete(f"{i}: an innocent prompt", stream=i % 2 == 0, seed=i))
        for i in range(NUM_INNOCENT)
    ]
    await rig.until(lambda: len(rig.submits()) >= NUM_INNOCENT)
    poison = await rig.complete([7] * 8, n=n)
    assert poison.status_code == 500
    assert "failed after 3 attempts" in poison.json()["error"]["message"]
    # At its third token it is not suspected yet: its worker failed with several requests.
    num_deaths = 3 + (moment == "third token")
    most = num_deaths if n == 1 else 2 * num_deaths  # completions may be on both workers
    assert num_deaths <= len(deaths) <= most
    assert deaths[-1] == 0, "the last time it was alone"
    for number, response in enumerate(await asyncio.gather(*others)):
        assert response.status_code == 200
        if number % 2 == 0:
            texts = [c["text"] for chunk in events(response) for c in chunk["choices"]]
            assert "".join(texts) == LONG
        else:
            assert response.json()["choices"][0]["text"] == LONG
    await rig.until(lambda: len(rig.attached()) == 2)
    assert (await rig.complete("afterwards")).status_code == 200
    model = rig.gateway.model("stub")
    assert model._placer._isolation._held == {}
    assert model._placer._isolation._waits_until == {}
    assert all(not w.reservations for w in model.fleet.workers)


async def test_innocents_are_not_counted_however_often_their_workers_are_lost(rig):
    """Three concurrent requests that crash workers once took four other clients' streams with
    them."""
    rig.answer = LONG
    await rig.start(running=False)
    work = asyncio.create_task(rig.complete("another client's"))
    for _ in range(8):
        await rig.until(lambda: any(w.running for w in rig.workers))
        [worker] = [w for w in rig.workers if w.running]
        worker.step()
        worker.crash()
        worker.send(worker.snapshot())
    await rig.until(lambda: any(w.running for w in rig.workers))
    rig.tasks = [asyncio.create_task(worker.run()) for worker in rig.workers]
    assert (await work).json()["choices"][0]["text"] == LONG
    assert rig.gateway.model("stub").stats.resubmissions == 8


async def test_a_suspect_waits_for_a_worker_of_its_own_only_so_long(rig, monkeypatch):
    """If every worker always has other requests, it is retried beside them eventually."""
    monkeypatch.setattr(isolation, "PATIENCE_S", 0.08)
    deaths = use_fragile(rig, "first step")
    await rig.start(running=False)
    rig.tasks = [asyncio.create_task(worker.run(interval_s=0.02)) for worker in rig.workers]
    others = [asyncio.create_task(rig.complete(f"{i}: an innocent prompt")) for i in range(6)]
    await rig.until(lambda: all(w.running for w in rig.workers))
    assert (await rig.complete([7] * 8)).status_code == 500
    assert len(deaths) == 3
    assert deaths[-1] > 0
    assert [r.status_code for r in await asyncio.gather(*others)] == [200] * 6


async def test_no_further_attempt_means_none(rig):
    await rig.start(running=False, routing=RoutingConfig(max_request_attempts=1))
    work = asyncio.create_task(rig.complete())
    await rig.until(lambda: any(w.running for w in rig.workers))
    [worker] = [w for w in rig.workers if w.running]
    worker.step()
    worker.crash()
    assert (await work).status_code == 500


@pytest.mark.usefixtures("short_ticks")
async def test_a_busy_worker_is_waited_for(rig):
    """Its event loop is blocked, but another of its threads sends signs of life."""
    await rig.start(running=False)
    work = asyncio.create_task(rig.complete())
    await rig.until(lambda: any(w.running for w in rig.workers))
    [busy] = [w for w in rig.workers if w.running]
    busy.busy = True
    [other] = [w for w in rig.workers if w is not busy]
    rig.tasks = [asyncio.create_task(other.run())]
    await rig.until(lambda: busy.num_asked >= 9)  # once a tick, after the first three
    assert (busy.num_attached, len(rig.submits())) == (1, 1)
    busy.busy = False  # it sends no more signs: it was stopped
    assert (await work).json()["choices"][0]["text"] == rig.answer
    assert len(rig.submits()) == 2
