"""Large batches do not block the frontend and rank 0."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import msgspec
import pytest

from tests.support.worker.played_engine import Engine, Gateway, decode_reply, delta, submit
from worker.frontend import event_loop_monitor
from worker.frontend.event_loop_monitor import LATE_S, EventLoopMonitor
from worker.frontend.intake import SLICE_BYTES, SLICE_ENTRIES, SLICE_SUBMITS, slices
from worker.frontend.server import WorkerFrontend
from worker.protocol.admission import AdmissionChange
from worker.protocol.messages import (
    Abort,
    CompiledGrammar,
    Submit,
    SubmitBatch,
    SubmitReply,
    WorkerUpdate,
    share_sampling,
)
from worker.protocol.sampling import SamplingParams

MANY = 2048
"""Completions that one request may ask for."""
SOME = 256
"""Enough to keep the loop busy for dozens of iterations."""


def heavy(number: int) -> Submit:
    """A submit with maximum parameters for a vocabulary of 32 tokens."""
    one = submit(str(number))
    one.sampling = SamplingParams(
        seed=number,
        stop=tuple("x" * 60 + str(i) for i in range(128)),
        stop_token_ids=(7,) * 1024,
        logit_bias=dict.fromkeys(range(32), 1.0),
        bad_words_token_ids=((1, 2, 3, 4, 5, 6),) * 256,
    )
    return one


def payload_of(submits: list[Submit]) -> bytes:
    return msgspec.msgpack.encode(share_sampling(SubmitBatch(submits=submits)))


@cache
def many(count: int, *, is_shared: bool = False) -> bytes:
    """A batch of heavy submits."""
    if not is_shared:
        return payload_of([heavy(number) for number in range(count)])
    submits, shared = [submit(str(number)) for number in range(count)], heavy(0).sampling
    for number, one in enumerate(submits):
        one.sampling, one.seed = shared, number
    return payload_of(submits)


@contextmanager
def turns() -> Iterator[list[float]]:
    """Times of the event loop's iterations."""
    seen: list[float] = []

    async def turn() -> None:
        while True:
            seen.append(time.monotonic())
            await asyncio.sleep(0)

    task = asyncio.create_task(turn())
    yield seen
    task.cancel()


@pytest.mark.parametrize("is_shared", [False, True])
async def test_the_loop_is_not_blocked_by_a_large_batch(
    front: WorkerFrontend, engine: Engine, is_shared: bool
) -> None:
    """Regression test: one request with all parameters at their limits blocked a frontend until its
    gateways gave up."""
    gateway = Gateway(front, "g0")
    await gateway.next()
    count = MANY if is_shared else SOME
    payload = many(count, is_shared=is_shared)
    with turns() as seen:
        reply = decode_reply(await front.submit(payload))
        # All are decoded, then all are validated.
        assert len(seen) >= 2 * max(len(payload) // SLICE_BYTES, count // SLICE_SUBMITS - 1)
    assert (reply.last_ordinal, reply.rejections) == (count, [])
    taken: list[str] = []
    while len(taken) < count:
        batch = await engine.batch()
        different = {id(s.sampling): s.sampling.num_entries for s in batch.submits}
        assert sum(different.values()) <= SLICE_ENTRIES, "rank 0 must not be blocked either"
        assert len(batch.submits) <= SLICE_SUBMITS
        assert len(different) == (1 if is_shared else len(batch.submits))
        taken += [s.request_id for s in batch.submits]
    assert taken == [str(number) for number in range(count)]
    await gateway.close()


async def test_others_are_served_in_between(front: WorkerFrontend, engine: Engine) -> None:
    one, two = Gateway(front, "g0"), Gateway(front, "g1")
    await one.next()
    await two.next()
    work = asyncio.create_task(front.submit(many(SOME)))
    await asyncio.sleep(0)
    await engine.step({"g1": [delta("x", 5)]})
    other = payload_of([submit("other", "g1")])
    assert decode_reply(await front.submit(other)).last_ordinal == 1
    item = await two.news()
    assert isinstance(item, WorkerUpdate)
    assert [d.request_id for d in item.deltas] == ["x"]
    assert not work.done()
    assert decode_reply(await work).last_ordinal == 1 + SOME
    await one.close()
    await two.close()


@pytest.mark.parametrize("event", ["the engine is lost", "and another is there", "detached"])
async def test_events_during_decoding_count(
    front: WorkerFrontend, engine: Engine, event: str
) -> None:
    gateway = Gateway(front, "g0")
    await gateway.next()
    work = asyncio.create_task(front.submit(many(SOME)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    again = None
    if event == "detached":
        await gateway.close()
    else:
        front.engine_lost("rank 0 died")
        if event == "and another is there":
            again = Engine(front.open())
            await again.ready()
            await front.wait_ready()
    assert not work.done()
    reply = decode_reply(await work)
    assert isinstance(reply, SubmitReply)
    assert reply.last_ordinal == 0
    assert [r.status for r in reply.rejections] == [503] * SOME
    if again is not None:
        again.close()


def test_grammars_lead_and_aborts_follow() -> None:
    grammar = CompiledGrammar("key", "xgrammar", "")
    batch = SubmitBatch(
        submits=[submit(str(number)) for number in range(2 * SLICE_SUBMITS + 1)],
        aborts=[Abort(request_id="old")],
        grammars=[grammar],
        dropped_grammars=["other"],
        admission=AdmissionChange({"prefill_max_tokens": 5}),
    )
    first, second, last = slices(batch)
    assert [len(part.submits) for part in (first, second, last)] == [SLICE_SUBMITS] * 2 + [1]
    assert (first.grammars, first.dropped_grammars) == ([grammar], ["other"])
    assert not any((first.aborts, second.grammars, second.aborts, last.grammars))
    assert (last.aborts, last.admission) == (batch.aborts, batch.admission)
    small = SubmitBatch(submits=batch.submits[:3], aborts=batch.aborts, grammars=[grammar])
    assert list(slices(small)) == [small]
    assert list(slices(SubmitBatch(aborts=batch.aborts))) == [SubmitBatch(aborts=batch.aborts)]


async def test_a_blocked_loop_sends_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop_monitor, "PERIOD_S", 0.05)
    monkeypatch.setattr(event_loop_monitor, "LATE_S", 0.1)
    signs: list[bytes] = []
    monitor = EventLoopMonitor(signs.append)
    front = WorkerFrontend("w0", "/tmp", loop_monitor=monitor)
    front.open()
    monitor.start()
    deadline = time.monotonic() + 120
    while len(signs) < 2:  # the loop is blocked, and this thread does not sleep
        assert time.monotonic() < deadline
    assert signs[0] != signs[1]
    monitor.close()
    front.close()


def test_a_running_loop_sends_none() -> None:
    signs: list[bytes] = []
    now = 0.0
    monitor = EventLoopMonitor(signs.append, lambda: now)
    for _ in range(100):
        now += 0.2
        monitor.check()
        monitor.beat()
    assert signs == []
    now += LATE_S + 0.1
    monitor.check()
    monitor.check()
    assert signs == [b"1", b"2"]

    def fail(value: bytes) -> None:
        raise ConnectionError("the store is gone")

    broken = EventLoopMonitor(fail, lambda: now)
    now += 1.0
    broken.check()  # the failure is only logged
