"""One channel over a scripted worker: epochs, attempts, aborts."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from router.channel import SubmitRejected, WorkerChannel, WorkerUnreachable, submit_queue
from tests.support.router.stub_worker import StubTransport, StubWorker
from worker.protocol.messages import AttachSnapshot, Submit, TokenDelta, WorkerUpdate
from worker.protocol.sampling import SamplingParams


class Recorder:
    """Receiver and listener that records all calls."""

    def __init__(self) -> None:
        self.deltas: list[TokenDelta] = []
        self.lost: list[str] = []
        self.failed: list[str] = []
        self.snapshots: list[AttachSnapshot] = []
        self.down: list[str] = []
        self.closed = False
        self.accepted: list[tuple[str, int, int]] = []

    def deliver(self, delta: TokenDelta, now: float) -> None:
        self.deltas.append(delta)

    def lose(self, reason: str) -> None:
        self.lost.append(reason)

    def fail(self, message: str) -> None:
        self.failed.append(message)

    def on_snapshot(self, worker_id: str, snapshot: AttachSnapshot) -> None:
        self.snapshots.append(snapshot)

    def on_update(self, worker_id: str, update: WorkerUpdate) -> None:
        pass

    def on_accepted(self, worker_id: str, request_id: str, epoch: int, ordinal: int) -> None:
        self.accepted.append((request_id, epoch, ordinal))

    def on_lost(self, worker_id: str, reason: str) -> None:
        self.down.append(reason)

    def on_closed(self, worker_id: str) -> None:
        self.closed = True


class Wire:
    def __init__(self) -> None:
        self.worker = StubWorker("w0", lambda submit: [1, 2, 3])
        self.seen = Recorder()
        self.channel = WorkerChannel("w0", "gw", StubTransport(self.worker), self.seen)

    async def until(self, condition) -> None:
        async with asyncio.timeout(120):
            while not condition():
                await asyncio.sleep(0.002)

    async def start(self) -> None:
        self.channel.start()
        await self.until(lambda: bool(self.seen.snapshots))

    def submit(self, request_id: str = "r", attempt: int = 0) -> asyncio.Task[None]:
        submit = Submit(
            request_id=request_id,
            gateway_id="gw",
            prompt=b"\1\0\0\0",
            sampling=SamplingParams(),
            attempt=attempt,
        )
        return asyncio.create_task(self.channel.submit(submit, self.seen))


@pytest.fixture
async def wire():
    wire = Wire()
    yield wire
    await wire.channel.close()
    assert wire.seen.closed


async def test_request_taken_by_the_next_rank_group_survives_its_snapshot(wire):
    await wire.start()
    wire.worker.epoch = 2  # rebuilt; the reply overtakes the snapshot
    await wire.submit("young")
    wire.worker.send(wire.worker.snapshot())
    wire.worker.step()
    await wire.until(lambda: bool(wire.seen.deltas))
    assert wire.seen.lost == []


async def test_request_of_the_last_rank_group_does_not(wire):
    await wire.start()
    await wire.submit("old")
    wire.worker.running.clear()
    wire.worker.epoch = 2
    wire.worker.send(wire.worker.snapshot())
    await wire.until(lambda: bool(wire.seen.lost))
    assert "rebuilt" in wire.seen.lost[0]


async def test_answer_of_a_rank_group_that_is_gone_counts_as_not_taken(wire):
    await wire.start()
    wire.worker.gate.clear()
    work = wire.submit()
    await wire.until(lambda: bool(wire.worker.batches))
    wire.worker.crash()
    wire.worker.epoch = 1  # the reply was sent before the crash
    await wire.until(lambda: bool(wire.seen.down))
    wire.worker.gate.set()
    with pytest.raises(WorkerUnreachable):
        await work


async def test_deltas_of_given_up_attempts_are_dropped(wire):
    await wire.start()
    await wire.submit(attempt=2)
    wire.worker.update([TokenDelta("r", 1, [7]), TokenDelta("other", 0, [8])], [])
    wire.worker.update([TokenDelta("r", 2, [9], "length")], [])
    await wire.until(lambda: bool(wire.seen.deltas))
    assert [delta.token_ids for delta in wire.seen.deltas] == [[9]]


async def test_tokens_may_overtake_the_answer(wire):
    await wire.start()
    wire.worker.gate.clear()
    work = wire.submit()
    await wire.until(lambda: bool(wire.worker.batches))
    wire.worker.update([TokenDelta("r", 0, [5])], [])
    await work
    assert [delta.token_ids for delta in wire.seen.deltas] == [[5]]


async def test_requests_a_step_of_the_event_loop_apart_are_one_call(wire):
    await wire.start()
    first = wire.submit("first")
    await asyncio.sleep(0)
    second = wire.submit("second")
    await first
    await second
    assert [[s.request_id for s in b.submits] for b in wire.worker.batches] == [["first", "second"]]


async def test_an_abort_of_the_only_submit_sends_no_call(wire):
    await wire.start()
    only = wire.submit("only")
    for _ in range(2):  # it is queued, and the call waits for others
        await asyncio.sleep(0)
    wire.channel.abort("only")
    await only
    await wire.submit("next")
    assert [[s.request_id for s in b.submits] for b in wire.worker.batches] == [["next"]]


async def test_abort_before_the_submit_left_sends_neither(wire):
    await wire.start()
    wire.worker.gate.clear()
    first = wire.submit("first")
    await wire.until(lambda: bool(wire.worker.batches))
    second = wire.submit("second")
    await asyncio.sleep(0)
    wire.channel.abort("second")
    wire.channel.abort("unknown")
    await second
    wire.worker.gate.set()
    await first
    await wire.submit("third")
    assert [[s.request_id for s in b.submits] for b in wire.worker.batches] == [
        ["first"],
        ["third"],
    ]
    assert wire.worker.aborted == []


async def test_aborts_that_did_not_arrive_are_sent_again(wire, monkeypatch):
    monkeypatch.setattr(submit_queue, "ABORT_RETRY_S", 0.01)
    await wire.start()
    await wire.submit()
    wire.worker.reachable = False  # only submits fail: the stream stays
    wire.channel.abort("r")
    with pytest.raises(WorkerUnreachable):
        await wire.submit("next")
    wire.worker.reachable = True
    await wire.until(lambda: "r" in wire.worker.aborted)


async def test_submit_to_a_worker_that_is_not_attached_fails_at_once(wire):
    wire.worker.reachable = False
    wire.channel.start()
    with pytest.raises(WorkerUnreachable):
        await wire.submit()


async def test_receiver_that_fails_takes_nobody_along(wire):
    await wire.start()

    class Broken(Recorder):
        def deliver(self, delta: TokenDelta, now: float) -> None:
            raise RuntimeError("cannot")

    broken = Broken()
    submit = Submit(request_id="b", gateway_id="gw", prompt=b"1234", sampling=SamplingParams())
    await wire.channel.submit(submit, broken)
    await wire.submit("r")
    wire.worker.step()
    await wire.until(lambda: bool(wire.seen.deltas))
    assert "internal error" in broken.failed[0]
    assert broken.lost == []
    await wire.until(lambda: wire.worker.aborted == ["b"])
    assert wire.seen.lost == []


async def test_accepted_submits_of_a_batch_have_consecutive_ordinals(wire):
    """Rejected ones have none; another gateway's submits arrive between batches."""
    await wire.start()
    wire.worker.gate.clear()
    works = [wire.submit("a")]
    await wire.until(lambda: bool(wire.worker.batches))
    works += [wire.submit(name) for name in ("b", "refused", "c")]
    await asyncio.sleep(0)
    wire.worker.num_submits += 5
    wire.worker.refuses = {"refused"}
    wire.worker.gate.set()
    results = await asyncio.gather(*works, return_exceptions=True)
    assert [isinstance(result, SubmitRejected) for result in results] == [False, False, True, False]
    assert wire.seen.accepted == [("a", 1, 6), ("b", 1, 7), ("c", 1, 8)]


async def test_refused_requests_are_not_left_to_the_garbage_collector(wire):
    """Under overload most requests are rejected."""
    await wire.start()
    wire.worker.refuses = {"refused"}
    submit = Submit(
        request_id="refused", gateway_id="gw", prompt=b"1234", sampling=SamplingParams()
    )
    gc.disable()
    try:
        with pytest.raises(SubmitRejected) as refused:
            await wire.channel.submit(submit, wire.seen)
        exception = weakref.ref(refused.value)
        del refused
        await asyncio.sleep(0)
        assert exception() is None
    finally:
        gc.enable()


async def test_strays_are_aborted_once(wire):
    """A submit whose reply was lost may keep running although no client waits for it."""
    await wire.start()
    for _ in range(3):
        wire.worker.update([TokenDelta("stray", 0, [1])], [])
    await wire.until(lambda: bool(wire.worker.aborted))
    wire.worker.update([TokenDelta("stray", 0, [], "abort")], [])
    await wire.submit("r")
    wire.worker.step()
    await wire.until(lambda: bool(wire.seen.deltas))
    assert wire.worker.aborted == ["stray"]


async def test_tokens_on_their_way_when_a_request_is_aborted_cause_no_second_abort(wire):
    await wire.start()
    await wire.submit("r")
    wire.channel.abort("r")
    wire.worker.update([TokenDelta("r", 0, [1])], [])
    wire.worker.update([TokenDelta("r", 0, [], "abort")], [])
    await wire.submit("next")
    wire.worker.step()
    await wire.until(lambda: bool(wire.seen.deltas))
    assert wire.worker.aborted == ["r"]


async def test_new_stream_does_not_mix_up_requests_of_the_old_one(wire):
    await wire.start()
    await wire.submit("old")
    wire.worker.send(None)  # the stream just ends
    await wire.until(lambda: len(wire.seen.snapshots) == 2)
    assert "the stream ended" in wire.seen.lost[0]
    await wire.submit("old", attempt=1)
    wire.worker.update([TokenDelta("old", 0, [7])], [])
    wire.worker.update([TokenDelta("old", 1, [8])], [])
    await wire.until(lambda: bool(wire.seen.deltas))
    assert [delta.token_ids for delta in wire.seen.deltas] == [[8]]


async def test_cancelled_stream_is_attached_again(wire):
    """The transport may cancel a call itself."""
    await wire.start()
    wire.worker.send(asyncio.CancelledError())
    await wire.until(lambda: len(wire.seen.snapshots) == 2)
    assert not wire.seen.closed
    await wire.submit()


async def test_cancelled_submit_counts_as_not_arrived(wire):
    await wire.start()
    wire.worker.failure = asyncio.CancelledError()
    with pytest.raises(WorkerUnreachable):
        await wire.submit("first")
    wire.worker.failure = None
    await wire.submit("second")
    assert wire.seen.accepted == [("second", 1, 1)]
