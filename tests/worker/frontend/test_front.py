"""The frontend with an engine simulated by the test: real sockets, real messages."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.worker.played_engine import (
    INFO,
    Engine,
    Gateway,
    decode_reply,
    delta,
    encode,
    send,
    submit,
)
from worker.frontend import server as front_module
from worker.frontend.attachment import Attachment, CacheMirror
from worker.frontend.grammar import service
from worker.frontend.server import WorkerFrontend
from worker.protocol import limits
from worker.protocol.admission import AdmissionChange
from worker.protocol.messages import (
    Abort,
    AttachSnapshot,
    BlockEvent,
    BlockRemoved,
    BlockStored,
    LoadSnapshot,
    PromptInFlight,
    StepReport,
    StepShape,
    Submit,
    SubmitBatch,
    TokenDelta,
    TokenLogprobs,
    WorkerDown,
    WorkerItem,
    WorkerUpdate,
    share_sampling,
)
from worker.protocol.sampling import SamplingParams
from worker.protocol.structured import StructuredOutputsParams


async def test_directory_is_private_and_its_sockets_have_short_names(front: WorkerFrontend) -> None:
    directory = front.open()
    assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
    assert len(f"{directory}/front".encode()) <= 107
    front.close()
    assert not os.path.exists(directory)


async def test_the_snapshot_is_loading_then_ready(front: WorkerFrontend) -> None:
    engine = Engine(front.open())
    gateway = Gateway(front, "g0")
    first = await gateway.next()
    assert isinstance(first, AttachSnapshot)
    assert first.info is None
    assert (await send(front, submit("r0"))).rejections[0].status == 503
    await engine.ready()
    second = await gateway.news()
    assert isinstance(second, AttachSnapshot)
    assert second.info is not None
    assert second.info.startup.keys() == {"launch"}, "this engine reports no phases"
    assert msgspec.structs.replace(second.info, startup={}) == INFO
    assert second.load.num_free_pages == second.load.num_total_pages == INFO.num_blocks > 0
    engine.close()


async def test_a_batch_is_forwarded_without_invalid_submits(
    front: WorkerFrontend, engine: Engine
) -> None:
    gateway = Gateway(front, "g0")
    await gateway.next()
    reply = await send(front, submit("fits"), submit("too-long", num_prompt=64))
    assert [r.request_id for r in reply.rejections] == ["too-long"]
    assert reply.rejections[0].status == 400
    assert [s.request_id for s in (await engine.batch()).submits] == ["fits"]


def structured(request_id: str, gateway_id: str = "g0", **params: Any) -> Submit:
    one = submit(request_id, gateway_id)
    form = StructuredOutputsParams(**params)
    one.sampling = msgspec.structs.replace(one.sampling, structured_outputs=form)
    return one


async def test_grammars_are_compiled_once_and_only_their_requests_wait(
    front: WorkerFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "PATIENCE_S", 60.0)
    demo = msgspec.structs.replace(INFO, model="deploy/models/demo", vocab_size=2560)
    engine = Engine(front.open())
    engine.stream.send(encode(demo))
    await front.wait_ready()
    gateway = Gateway(front, "g0")
    await gateway.next()
    slow = asyncio.create_task(send(front, structured("slow", regex="a{3}")))
    broken = asyncio.create_task(send(front, structured("broken", regex="(a")))
    await asyncio.sleep(0)
    assert (await send(front, submit("plain"))).last_ordinal == 1, "while the others compile"
    assert not slow.done()
    assert (await slow).last_ordinal == 2
    [rejection] = (await broken).rejections
    assert rejection.status == 400
    assert "parenthesis" in rejection.message
    assert (await send(front, structured("again", regex="a{3}"))).last_ordinal == 3
    plain, first, again = [await engine.batch() for _ in range(3)]
    assert [s.request_id for s in plain.submits] == ["plain"]
    [grammar] = first.grammars
    assert first.vocabulary is not None
    assert first.submits[0].grammar == again.submits[0].grammar == grammar.key
    assert first.submits[0].sampling.structured_outputs is None, "the grammar is not sent twice"
    assert (again.grammars, again.vocabulary) == ([], None)
    front.engine_lost("rank 0 died")
    engine.close()
    engine = Engine(front.open())
    engine.stream.send(encode(demo))
    await front.wait_ready()
    await send(front, structured("next", regex="a{3}"))
    batch = await engine.batch()
    assert batch.grammars == [grammar], "the next engine has no grammars yet"
    assert batch.vocabulary is not None
    engine.close()


async def test_replies_number_the_submits_of_all_gateways_and_of_one_epoch(
    front: WorkerFrontend, engine: Engine
) -> None:
    one, two = Gateway(front, "g1"), Gateway(front, "g2")
    await one.next()
    await two.next()
    too_long = submit("too-long", "g1", num_prompt=64)
    assert (await send(front, submit("a", "g1"), too_long)).last_ordinal == 1
    assert (await send(front, submit("b", "g2"), submit("c", "g2"))).last_ordinal == 3
    assert (await send(front, too_long)).last_ordinal == 0
    assert (await send(front, submit("d", "g1"))).last_ordinal == 4
    taken = [s.request_id for _ in range(3) for s in (await engine.batch()).submits]
    assert taken == ["a", "b", "c", "d"]
    front.engine_lost("rank 0 died")
    again = Engine(front.open())
    await again.ready()
    await front.wait_ready()
    reply = await send(front, submit("e", "g2"))
    assert (reply.epoch, reply.last_ordinal) == (2, 1)
    again.close()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"prompt": np.array([1, 32], "<i4").tobytes()}, "token id 32 is out of range"),
        ({"prompt": np.array([1, -7], "<i4").tobytes()}, "token id -7 is out of range"),
        ({"prompt": bytes(7)}, "7 bytes"),
        ({"prompt": b""}, "empty"),
        ({"num_resumed": 4}, "num_resumed must be in [0, 4), got 4"),
        ({"num_resumed": -1}, "num_resumed must be in [0, 4), got -1"),
    ],
)
async def test_submits_that_would_crash_a_rank_are_rejected(
    front: WorkerFrontend, engine: Engine, fields: dict[str, object], problem: str
) -> None:
    gateway = Gateway(front, "g0")
    await gateway.next()
    reply = await send(front, msgspec.structs.replace(submit("bad"), **fields), submit("good"))
    [rejection] = reply.rejections
    assert (rejection.request_id, rejection.status) == ("bad", 400)
    assert problem in rejection.message
    assert [s.request_id for s in (await engine.batch()).submits] == ["good"]


async def test_min_tokens_counts_what_another_worker_generated(
    front: WorkerFrontend, engine: Engine
) -> None:
    gateway = Gateway(front, "g0")
    await gateway.next()
    moved = msgspec.structs.replace(
        submit("moved"),
        prompt=np.arange(1, 31, dtype="<i4").tobytes(),
        num_resumed=20,
        sampling=SamplingParams(min_tokens=50, max_tokens=50),
    )
    reply = await send(front, moved, msgspec.structs.replace(moved, request_id="x", num_resumed=9))
    [rejection] = reply.rejections
    assert rejection.request_id == "x"
    assert "after a prompt of 21 tokens only 43 can be generated" in rejection.message
    assert [s.request_id for s in (await engine.batch()).submits] == ["moved"]


async def test_a_gateway_that_does_not_read_costs_bounded_memory(
    front: WorkerFrontend, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is disconnected; when it reads again, it reattaches and gets the current cache."""
    monkeypatch.setattr(front_module, "MAX_PENDING_EVENTS", 5)
    stalled, probe = Gateway(front, "stalled"), Gateway(front, "probe")
    await stalled.next()
    await probe.next()
    await send(front, submit("open", "stalled"))
    await engine.batch()
    for block in range(1, 8):
        await engine.step(events=[BlockStored([block], None)])
        await probe.news()
    assert [a.request_id for a in (await engine.batch()).aborts] == ["open"]
    with pytest.raises(StopAsyncIteration):
        await stalled.news()
    again = Gateway(front, "stalled")
    snapshot = await again.next()
    assert isinstance(snapshot, AttachSnapshot)
    assert len(snapshot.blocks) == 7


async def test_each_gateway_gets_its_own_tokens_and_everybodys_blocks(
    front: WorkerFrontend, engine: Engine
) -> None:
    one, two = Gateway(front, "g1"), Gateway(front, "g2")
    await one.next()
    await two.next()
    stored = BlockStored(block_hashes=[7], parent_hash=None)
    await engine.step({"g1": [delta("a", 5, cached=0)]}, [stored], running=3)
    first, second = await one.news(), await two.news()
    assert isinstance(first, WorkerUpdate)
    assert isinstance(second, WorkerUpdate)
    assert [d.token_ids for d in first.deltas] == [[5]]
    assert second.deltas == []
    assert first.block_events == second.block_events == [stored]
    assert first.load is not None
    assert second.load is not None
    assert first.load.num_running == second.load.num_running == 3


def test_tokens_are_sent_at_once_and_reports_with_heartbeats_or_if_needed() -> None:
    stream, load, other = Attachment(lambda: None), LoadSnapshot(), LoadSnapshot(num_waiting=1)

    def step(block: int, *deltas: TokenDelta) -> WorkerUpdate | None:
        stream.put_step(1, list(deltas), [BlockStored([block], None)], load, computed=[block])
        item = stream.take_item()
        assert item is None or isinstance(item, WorkerUpdate)
        return item

    def blocks(item: WorkerItem | None) -> list[int]:
        assert isinstance(item, WorkerUpdate)
        assert item.load is not None
        assert item.computed == [h for event in item.block_events for h in event.block_hashes]
        return item.computed

    assert step(1) is None
    tokens = step(2, delta("a", 5))
    assert tokens is not None
    assert (tokens.load, tokens.block_events, tokens.deltas[0].token_ids) == (None, [], [5])
    assert blocks(step(3, delta("b", 5, cached=0))) == [1, 2, 3], "b's prompt is in the cache now"
    assert step(4) is None
    assert blocks(step(5, delta("a", 6, finish="stop"))) == [4, 5], "a's next turn may follow"
    assert step(6, delta("b", 7)) is not None
    stream.put_prompts(1, [PromptInFlight(9, b"")], other)
    item = stream.take_item()
    assert blocks(item) == [6]
    assert isinstance(item, WorkerUpdate)
    assert (item.load, [p.ordinal for p in item.prompts]) == (other, [9])
    assert step(7) is None
    stream.beat(1, load, [])
    assert blocks(stream.take_item()) == [7]
    stream.beat(1, load)
    assert blocks(stream.take_item()) == []


async def test_steps_that_pile_up_are_merged_in_order(
    front: WorkerFrontend, engine: Engine
) -> None:
    gateway, probe = Gateway(front, "g0"), Gateway(front, "probe")
    await gateway.next()
    await probe.next()
    await engine.step({"g0": [delta("a", 1, cached=3)]}, [BlockStored([1], None)])
    await engine.step({"g0": [delta("a", 2), delta("b", 9)]})
    await engine.step({"g0": [delta("a", 3, finish="stop")]}, [BlockRemoved([1])])
    await engine.step({"probe": [delta("p", 0)]})
    while not (isinstance(item := await probe.news(), WorkerUpdate) and item.deltas):
        pass
    update = await gateway.news()
    assert isinstance(update, WorkerUpdate)
    assert [(d.request_id, d.token_ids, d.finish_reason) for d in update.deltas] == [
        ("a", [1, 2, 3], "stop"),
        ("b", [9], None),
    ]
    assert update.deltas[0].num_cached_tokens == 3
    assert update.block_events == [BlockStored([1], None), BlockRemoved([1])]


async def test_log_probabilities_of_steps_that_pile_up_stay_one_per_token(
    front: WorkerFrontend, engine: Engine
) -> None:
    gateway, probe = Gateway(front, "g0"), Gateway(front, "probe")
    await gateway.next()
    await probe.next()
    for token in (4, 5, 6):
        scored = delta("a", token)
        scored.logprobs = [TokenLogprobs.pack([token], [-0.5], 1)]
        if token == 4:
            partial = delta("a")
            partial.prompt_logprobs = [TokenLogprobs.pack([2], [-1.0], 1)]
            await engine.step({"g0": [partial]})
            scored.prompt_logprobs = [TokenLogprobs.pack([1], [-2.0], 3)]
        await engine.step({"g0": [scored]})
    await engine.step({"probe": [delta("p", 0)]})
    while not (isinstance(item := await probe.news(), WorkerUpdate) and item.deltas):
        pass
    update = await gateway.news()
    assert isinstance(update, WorkerUpdate)
    [merged] = update.deltas
    assert merged.token_ids == [4, 5, 6]
    assert [scored.token_ids for scored in merged.logprobs or ()] == [[4], [5], [6]]
    assert [scored.token_ids for scored in merged.prompt_logprobs or ()] == [[2], [1]]


@pytest.mark.parametrize("drafts", [[[7, -1], [7, 8]], [[7, 8], None], [None, [9, -1]]])
async def test_merged_blocks_keep_the_last_state(
    front: WorkerFrontend, engine: Engine, drafts: list[list[int] | None]
) -> None:
    gateway, probe = Gateway(front, "g0"), Gateway(front, "probe")
    await gateway.next()
    await probe.next()
    for draft in drafts:
        running = delta("a", 4)
        running.draft = draft
        await engine.step({"g0": [running]})
    await engine.step({"probe": [delta("p", 0)]})
    while not (isinstance(item := await probe.news(), WorkerUpdate) and item.deltas):
        pass
    update = await gateway.news()
    assert isinstance(update, WorkerUpdate)
    [merged] = update.deltas
    assert merged.draft == drafts[-1]


async def test_updates_count_without_gaps_and_come_when_idle(
    front: WorkerFrontend, engine: Engine
) -> None:
    gateway = Gateway(front, "g0")
    await gateway.next()
    items = [await gateway.next() for _ in range(3)]
    assert [item.seq for item in items if isinstance(item, WorkerUpdate)] == [1, 2, 3]


async def test_closing_the_stream_aborts_open_requests(
    front: WorkerFrontend, engine: Engine
) -> None:
    gateway = Gateway(front, "g0")
    await gateway.next()
    await send(front, submit("done"), submit("open", attempt=2))
    await engine.batch()
    await engine.step({"g0": [delta("done", 1, finish="stop")]})
    await gateway.news()
    await gateway.close()
    assert [(a.request_id, a.attempt) for a in (await engine.batch()).aborts] == [("open", 2)]
    reply = await send(front, submit("late"))
    assert reply.rejections[0].status == 503


async def test_the_end_of_an_earlier_attempt_leaves_the_later_one_open(
    front: WorkerFrontend, engine: Engine
) -> None:
    gateway = Gateway(front, "g0")
    await gateway.next()
    await send(front, submit("r", attempt=0))
    await send(front, submit("r", attempt=1))
    for _ in range(2):
        await engine.batch()
    await engine.step({"g0": [delta("r", finish="abort")]})
    await gateway.news()
    await gateway.close()
    assert [(a.request_id, a.attempt) for a in (await engine.batch()).aborts] == [("r", 1)]


async def test_attaching_again_ends_the_earlier_stream_only(
    front: WorkerFrontend, engine: Engine
) -> None:
    earlier = Gateway(front, "g0")
    await earlier.next()
    await send(front, submit("old"))
    await engine.batch()
    later = Gateway(front, "g0")
    await later.next()
    assert [a.request_id for a in (await engine.batch()).aborts] == ["old"]
    await send(front, submit("new"))
    assert [s.request_id for s in (await engine.batch()).submits] == ["new"]
    with contextlib.suppress(StopAsyncIteration):
        while True:
            await earlier.next()
    await engine.step({"g0": [delta("new", 4)]})
    assert isinstance(await later.news(), WorkerUpdate)


async def test_a_failed_engine_ends_its_epoch(front: WorkerFrontend, engine: Engine) -> None:
    gateway = Gateway(front, "g0")
    await gateway.next()
    await engine.step(events=[BlockStored([1, 2], None)])
    await gateway.news()
    old_directory = engine.directory
    front.engine_lost("rank 1 died: out of memory")
    down = await gateway.news()
    assert down == WorkerDown(epoch=1, reason="rank 1 died: out of memory")
    assert not os.path.exists(old_directory)
    again = Engine(front.open())
    await again.ready()
    snapshot = await gateway.news()
    assert isinstance(snapshot, AttachSnapshot)
    assert (snapshot.epoch, snapshot.blocks) == (2, [])
    assert snapshot.info is not None
    assert msgspec.structs.replace(snapshot.info, startup={}) == INFO
    again.close()


async def test_admission_options_reach_rank_0_and_its_successor(
    front: WorkerFrontend, engine: Engine
) -> None:
    change = AdmissionChange({"prefill_admission_policy": "pack"})
    await front.submit(encode(SubmitBatch(admission=change)))
    assert (await engine.batch()).admission == change
    wrong = encode({"admission": {"given": {"prefill_max_tokens": -1}}})
    with pytest.raises(ValueError, match="prefill_max_tokens in --scheduler-config"):
        await front.submit(wrong)
    front.engine_lost("rank 0 died")
    again = Engine(front.open())
    await again.ready()
    assert (await again.batch()).admission == change
    again.close()


async def test_a_burst_between_two_reports_is_rejected_beyond_slots_and_queue(
    front: WorkerFrontend,
) -> None:
    engine = Engine(front.open())
    engine.stream.send(encode(msgspec.structs.replace(INFO, max_queued_requests=3)))
    await front.wait_ready()
    gateway = Gateway(front, "g0")
    await gateway.next()
    reply = await send(front, *(submit(f"r{i}") for i in range(20)))
    assert [r.status for r in reply.rejections] == [429] * 9  # 8 slots and 3 in the queue
    assert all(r.retry_after_s >= 1 for r in reply.rejections)
    assert [s.request_id for s in (await engine.batch()).submits] == [f"r{i}" for i in range(11)]
    assert [r.status for r in (await send(front, submit("more"))).rejections] == [429]
    engine.close()


async def test_a_gap_in_the_reports_breaks_the_engine(
    front: WorkerFrontend, engine: Engine
) -> None:
    await engine.step()
    engine.seq += 1
    await engine.step()
    reason = await asyncio.wait_for(front.wait_broken(), 120)
    assert reason == "got engine report 3, expected 2"


def test_mirror_gives_chains_parents_first() -> None:
    mirror = CacheMirror()
    mirror.apply([BlockStored([1, 2, 3], None), BlockStored([20, 21], 2), BlockStored([4], 3)])
    mirror.apply([BlockRemoved([21])])
    assert mirror.chains() == [
        BlockStored([1, 2, 3], None),
        BlockStored([20], 2),
        BlockStored([4], 3),
    ]


async def test_other_gateways_see_submits_before_rank_0_receives_them(
    front: WorkerFrontend, engine: Engine
) -> None:
    one, two = Gateway(front, "one"), Gateway(front, "two")
    assert isinstance(await one.next(), AttachSnapshot)
    assert isinstance(await two.next(), AttachSnapshot)
    tokens = np.arange(24, dtype="<i4").tobytes()
    submits = [
        Submit(
            request_id=f"r{number}",
            gateway_id="one",
            prompt=tokens,
            sampling=SamplingParams(),
            num_expected_cached=8 * number,
        )
        for number in range(2)
    ]
    reply = decode_reply(await front.submit(encode(SubmitBatch(submits=submits))))
    item = await two.next()
    assert isinstance(item, WorkerUpdate)
    load = item.load
    assert (load.num_reserved, load.reserved_prefill_tokens) == (2, 24 + 16)
    assert load.num_submits_reserved == reply.last_ordinal == 2
    # A gateway that attaches now gets them too.
    three = Gateway(front, "three")
    snapshot = await three.next()
    assert isinstance(snapshot, AttachSnapshot)
    assert snapshot.load.num_reserved == 2
    await engine.batch()
    for seen, left in ((1, (1, 16)), (2, (0, 0))):
        engine.seq += 1
        load = LoadSnapshot(num_running=seen, num_submits_seen=seen)
        events: list[BlockEvent] = [BlockStored([seen], None)]
        report = StepReport(seq=engine.seq, deltas={}, block_events=events, load=load)
        engine.stream.send(encode(report))
        item = await two.news()
        assert isinstance(item, WorkerUpdate)
        assert (item.load.num_reserved, item.load.reserved_prefill_tokens) == left
        assert item.load.num_running == seen
    front.engine_lost("killed")
    down = await two.news()
    assert isinstance(down, WorkerDown)
    for gateway in (one, two, three):
        await gateway.close()


async def test_other_gateways_get_prompts_until_they_are_computed_aborted_or_lost(
    front: WorkerFrontend, engine: Engine
) -> None:
    one, two = Gateway(front, "one"), Gateway(front, "two")
    await one.next()
    await two.next()
    requests = [submit(f"r{number}", "one") for number in range(4)]
    for number, request in enumerate(requests[:3]):
        request.sampled_blocks = bytes([number]) * 8
    requests[3].shared_block = 5
    await send(front, *requests)
    prompts: list[PromptInFlight] = []
    computed: list[int] = []

    async def read() -> None:
        item = await two.next()
        assert isinstance(item, WorkerUpdate)
        prompts.extend(item.prompts)
        computed.extend(item.computed)

    await read()
    assert [(p.ordinal, p.sampled_blocks[:1], p.shared_block) for p in prompts] == [
        (1, b"\0", 0), (2, b"\1", 0), (3, b"\2", 0), (4, b"", 5),
    ]  # fmt: skip
    three = Gateway(front, "three")
    snapshot = await three.next()
    assert isinstance(snapshot, AttachSnapshot)
    assert [p.ordinal for p in snapshot.prompts] == [1, 2, 3]
    # The first token, an abort, and the end of the gateway's stream.
    await engine.step({"one": [delta("r0", 5, cached=0)]})
    while computed != [1]:
        await read()
    await front.submit(encode(SubmitBatch(aborts=[Abort(request_id="r1")])))
    while computed != [1, 2]:
        await read()
    while not (isinstance(own := await one.next(), WorkerUpdate) and own.deltas):
        assert not isinstance(own, WorkerUpdate) or not own.prompts
    await one.close()
    while computed != [1, 2, 3]:
        await read()
    for gateway in (two, three):
        await gateway.close()


def test_mirror_keeps_tiers_apart() -> None:
    mirror = CacheMirror()
    mirror.apply([BlockStored([1, 2, 3], None), BlockStored([2, 3], 1, "host")])
    mirror.apply([BlockRemoved([3]), BlockRemoved([2], "host"), BlockStored([4], 3, "host")])
    assert mirror.chains() == [BlockStored([1, 2], None), BlockStored([3, 4], 2, "host")]


async def test_the_start_is_reported_phase_by_phase_and_adds_up(tmp_path: Path) -> None:
    front = WorkerFrontend("w0", str(tmp_path))
    engine = Engine(front.open())
    ranks = {"load_weights": 1e-9, "capture": 2e-9}
    engine.stream.send(encode(msgspec.structs.replace(INFO, startup=ranks)))
    info = await front.wait_ready()
    assert info.startup == ranks | {"launch": info.startup["launch"]}
    assert info.startup["launch"] > 0.0
    load = LoadSnapshot(step_ms=20.0, step_shape=StepShape(1, decode_rows=2))
    engine.stream.send(encode(StepReport(seq=1, deltas={}, block_events=[], load=load)))
    async with asyncio.timeout(120):
        while not front.latency.decode_step.total:
            await asyncio.sleep(0.01)
    assert front.latency.decode_step.total == 0.02
    engine.close()
    front.close()


async def test_shared_parameters_are_validated_once_and_stay_shared(
    front: WorkerFrontend, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression test: thousands of copies of large parameters blocked a frontend until its
    gateways gave up."""
    looked: list[object] = []
    watched: list[tuple[object, str]] = [
        (limits, "sampling_problem"),
        (SamplingParams, "_check_draws"),
    ]
    for owner, name in watched:
        plain = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, plain=plain: looked.append(a) or plain(*a))
    gateway = Gateway(front, "g0")
    await gateway.news()
    shared = SamplingParams(allowed_token_ids=tuple(range(32)), stop_token_ids=(1, 2, 3))
    submits = [submit(str(number), num_prompt=min(number, 4)) for number in range(512)]
    for number, one in enumerate(submits):
        one.sampling, one.seed = shared, number
    payload = encode(share_sampling(SubmitBatch(submits=submits)))
    looked.clear()
    reply = decode_reply(await front.submit(payload))
    assert len(looked) == 2, "once to decode, once to validate"
    assert [r.request_id for r in reply.rejections] == ["0"], "it has no prompt"
    batch = await engine.batch()
    assert [s.seed for s in batch.submits] == list(range(1, 512))
    assert {id(s.sampling) for s in batch.submits} == {id(batch.submits[0].sampling)}
    assert batch.submits[0].sampling == shared
    await gateway.close()


async def test_a_repeated_submit_is_accepted_once(front: WorkerFrontend, engine: Engine) -> None:
    """It is neither sent again nor rejected, since its request is still running."""
    gateway = Gateway(front, "g0")
    await gateway.next()
    assert (await send(front, submit("r"), submit("r"))).last_ordinal == 1
    reply = await send(front, submit("r"))
    assert (reply.rejections, reply.last_ordinal) == ([], 0)
    assert (await send(front, submit("r", attempt=1), submit("r"))).last_ordinal == 2
    assert (await send(front, submit("s"), submit("r"))).last_ordinal == 3
    assert front.load.num_reserved == 3
    batches = [await engine.batch() for _ in range(3)]
    assert [[(s.request_id, s.attempt) for s in one.submits] for one in batches] == [
        [("r", 0)],
        [("r", 1)],
        [("s", 0)],
    ]


async def test_a_repeated_submit_is_not_rejected_for_a_full_queue(front: WorkerFrontend) -> None:
    engine = Engine(front.open())
    engine.stream.send(encode(msgspec.structs.replace(INFO, max_queued_requests=1, max_num_seqs=1)))
    await front.wait_ready()
    gateway = Gateway(front, "g0")
    await gateway.next()
    assert not (await send(front, submit("a"), submit("b"))).rejections
    assert [r.status for r in (await send(front, submit("c"))).rejections] == [429]
    assert not (await send(front, submit("b"), submit("a"))).rejections
    engine.close()
