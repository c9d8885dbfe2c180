"""Requests of a failed worker are resumed on another one, invisibly to clients."""

from __future__ import annotations

import asyncio
import re

import numpy as np
import pytest

from router.config import RoutingConfig
from router.serving import placing
from tests.support.router.stub_worker import StubWorker
from tests.support.router.worker_loss import finish, lost_after
from worker.protocol.messages import Submit, TokenDelta

LONG = "héllo wörld 🙂, the quick brown fox jumps over the lazy dog. " * 2


def tokens_of(submit: Submit) -> list[int]:
    return np.frombuffer(submit.prompt, "<i4").tolist()


def pieces(chunks: list[dict]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


@pytest.mark.parametrize("num_steps", [0, 1, 2, 7])
async def test_the_next_worker_gets_prompt_and_tokens_so_far(rig, events, num_steps):
    rig.answer = LONG
    await rig.start(running=False)
    body = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "logprobs": 1,
        "seed": 5,
    }
    work = asyncio.create_task(rig.complete("some prompt", **body))
    finish(await lost_after(rig, num_steps))
    chunks = events(await work)
    first, second = rig.submits()
    tokens = rig.script(first)
    assert tokens_of(second) == tokens_of(first) + tokens[:num_steps]
    assert (second.num_resumed, second.attempt) == (num_steps, first.attempt + 1)
    assert second.is_resubmitted
    assert not first.is_resubmitted
    assert second.sampling == first.sampling
    assert second.request_id == first.request_id
    assert second.waited_ms > first.waited_ms
    assert pieces(chunks) == {0: LONG}
    *_, end, total = chunks
    assert end["choices"][0]["finish_reason"] == "stop"
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [t for choice in choices for t in choice["token_ids"]] == tokens
    scored = [x for choice in choices for x in choice["logprobs"]["token_logprobs"]]
    assert scored == [-1.0] * len(tokens)
    assert total["usage"]["completion_tokens"] == len(tokens)
    assert total["usage"]["prompt_tokens"] == len(tokens_of(first))
    model = rig.gateway.model("stub")
    assert model.stats.resubmissions == 1
    assert model.stats.generation_tokens == len(tokens)
    assert sum(model.stats.latency(None).first_token.counts) == 1
    text = (await rig.client.get("/metrics")).text
    assert re.search(r'rayfleet_resubmissions_total{.*model_name="stub".*} 1.0', text)


async def test_nothing_stays_booked(rig):
    await rig.start(running=False)
    works = [asyncio.create_task(rig.complete(f"{i} some prompt of its own")) for i in range(6)]
    await rig.until(lambda: sum(len(w.running) for w in rig.workers) == 6)
    lost, other = rig.workers
    lost.step()
    other.step()
    lost.vanish()
    await rig.until(lambda: len(other.running) == 6)
    fleet = rig.gateway.model("stub").fleet
    other.step()
    await rig.until(lambda: len(fleet.in_flight) == 0)
    finish(other)
    responses = await asyncio.gather(*works)
    assert [response.status_code for response in responses] == [200] * 6
    assert all(not w.reservations and not w.reserved_tokens for w in fleet.workers)


async def test_cached_tokens_are_those_of_the_first_attempt(rig):
    await rig.start(running=False)
    await rig.until(lambda: len(rig.attached()) == 2)
    for worker in rig.workers[:1]:  # its cache would have all of it
        worker.blocks.clear()
    work = asyncio.create_task(rig.complete("a prompt that is not cached anywhere"))
    after = await lost_after(rig, 3)
    [running] = after.running.values()
    running.cached = len(tokens_of(running.submit)) - 1
    finish(after)
    details = (await work).json()["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == 0


async def test_a_stop_string_across_the_loss_ends_the_text(rig):
    await rig.start(running=False)
    tokens = rig.script(None)
    work = asyncio.create_task(rig.complete(stop=["world, the"], max_tokens=50))
    cut = next(i for i in range(len(tokens)) if "world" in rig.tokenizer.decode(tokens[:i]))
    after = await lost_after(rig, cut)
    finish(after)
    [choice] = (await work).json()["choices"]
    assert choice["text"] == "hello "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "world, the")


async def test_max_tokens_counts_all_attempts(rig):
    await rig.start(running=False)
    work = asyncio.create_task(rig.complete(max_tokens=5))
    finish(await lost_after(rig, 3))
    answer = (await work).json()
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_every_choice_continues(rig, events):
    rig.answer = LONG
    await rig.start(running=False)
    work = asyncio.create_task(rig.complete(n=4, stream=True))
    await rig.until(lambda: sum(len(w.running) for w in rig.workers) == 4)
    for worker in rig.workers:
        worker.step()
    lost, other = rig.workers
    lost.crash()
    await rig.until(lambda: len(other.running) == 4)
    finish(other)
    assert pieces(events(await work)) == dict.fromkeys(range(4), LONG)


async def test_blocks_continue_at_a_border_and_rounds_add_up(rig):
    rig.answer = LONG
    for worker in rig.workers:
        worker.info.block_size = 4
    await rig.start(running=False)
    work = asyncio.create_task(rig.complete())
    after = await lost_after(rig, 2)
    assert rig.submits()[1].num_resumed == 8
    finish(after)
    answer = (await work).json()
    tokens = len(rig.script(None))
    blocks = -(-tokens // 4)
    assert answer["choices"][0]["text"] == rig.answer
    # The stub counts three rounds per block, and one pass more per attempt.
    assert answer["usage"]["diffusion"]["rounds"] == 3 * blocks
    assert answer["usage"]["diffusion"]["forwards"] == 3 * blocks + 2


async def test_tokens_of_the_lost_attempt_count_no_more(rig):
    """The worker was only blocked: late deltas of the old attempt must not be repeated."""
    await rig.start(running=False)
    work = asyncio.create_task(rig.complete())
    await rig.until(lambda: any(w.running for w in rig.workers))
    [worker] = [w for w in rig.workers if w.running]
    worker.step()
    old = dict(worker.running)
    worker.send(ConnectionError("the stream broke, the worker did not"))
    await rig.until(lambda: len(rig.submits()) == 2)
    [after] = [w for w in rig.workers if any(r not in old.values() for r in w.running.values())]
    await rig.until(lambda: len(rig.attached()) == 2)
    request_id = rig.submits()[0].request_id
    worker.update([TokenDelta(request_id, 0, [7, 7, 7])], [])
    after.update([TokenDelta(request_id, 0, [7, 7, 7], "stop")], [])
    finish(after)
    assert (await work).json()["choices"][0]["text"] == rig.answer


async def test_a_request_waits_for_its_only_worker_to_come_back(rig):
    rig.workers[1].ready = False
    await rig.start(running=False, attached=1)
    worker = rig.workers[0]
    work = asyncio.create_task(rig.complete())
    await rig.until(lambda: bool(worker.running))
    worker.step()
    worker.crash()
    await rig.until(lambda: not rig.attached())
    assert (await rig.complete()).status_code == 503  # new requests do not wait
    worker.send(worker.snapshot())
    await rig.until(lambda: bool(worker.running))
    finish(worker)
    assert (await work).json()["choices"][0]["text"] == rig.answer


async def test_it_does_not_wait_for_ever(rig, events):
    rig.workers[1].ready = False
    await rig.start(running=False, attached=1, routing=RoutingConfig(no_worker_timeout_s=0.05))
    works = [asyncio.create_task(rig.complete(stream=stream)) for stream in (True, False)]
    worker = rig.workers[0]
    await rig.until(lambda: len(worker.running) == 2)
    worker.step()
    worker.crash()
    for work in works:
        response = await work
        assert "rank 0 was killed; then no worker of model stub" in response.text
        assert '"error"' in response.text
    assert response.status_code == 500


async def test_a_request_that_kills_workers_is_given_up(rig):
    """It uses no more workers than allowed, and other requests are resumed."""
    await rig.start(running=False)
    poison = asyncio.create_task(rig.complete("poison", stream=True))
    for attempt in range(3):
        await rig.until(lambda attempt=attempt: len(rig.submits()) == attempt + 1)
        [worker] = [w for w in rig.workers if w.running]
        await rig.until(lambda worker=worker: _accepted(rig, worker))
        worker.crash()
        worker.send(worker.snapshot())
    response = await poison
    assert response.status_code == 500
    assert "failed after 3 attempts" in response.json()["error"]["message"]
    assert "rank 0 was killed" in response.json()["error"]["message"]
    await rig.until(lambda: len(rig.attached()) == 2)
    other = asyncio.create_task(rig.complete())
    await rig.until(lambda: any(w.running for w in rig.workers))
    for worker in rig.workers:
        finish(worker)
    assert (await other).status_code == 200
    assert len(rig.submits()) == 4


def _accepted(rig, worker: StubWorker) -> bool:
    requests = rig.gateway.model("stub")._channels[worker.worker_id]._in_flight
    return all(request.ack.done() for request in requests.values())


async def test_a_client_that_leaves_while_its_request_waits_is_forgotten(rig, monkeypatch):
    monkeypatch.setattr(placing, "LAST_PAUSE_S", 0.1)
    rig.workers[1].ready = False
    await rig.start(running=False, attached=1)
    worker = rig.workers[0]
    work = asyncio.create_task(rig.complete())
    await rig.until(lambda: bool(worker.running))
    worker.crash()
    await rig.until(lambda: not rig.attached())
    model = rig.gateway.model("stub")
    assert len(model._placer._resuming) == 1
    work.cancel()
    await rig.until(lambda: not model._placer._resuming)
    worker.send(worker.snapshot())
    await rig.until(lambda: bool(rig.attached()))
    assert len(rig.submits()) == 1
    assert model.stats.finished == {"abort": 1, "stop": 0, "length": 0, "error": 0}


async def test_a_gateway_that_closes_ends_what_waits(rig):
    rig.workers[1].ready = False
    await rig.start(running=False, attached=1)
    work = asyncio.create_task(rig.complete())
    await rig.until(lambda: bool(rig.workers[0].running))
    rig.workers[0].crash()
    await rig.until(lambda: not rig.attached())
    await rig.gateway.close()
    assert "shutting down" in (await work).json()["error"]["message"]


async def test_a_leaving_worker_that_breaks_off_has_its_requests_moved(rig):
    await rig.start(running=False)
    work = asyncio.create_task(rig.complete())
    await rig.until(lambda: any(w.running for w in rig.workers))
    [leaving] = [w for w in rig.workers if w.running]
    [staying] = [w for w in rig.workers if w is not leaving]
    rig.transport.set_members(staying.worker_id)
    leaving.step()
    leaving.vanish()
    await rig.until(lambda: bool(staying.running))
    finish(staying)
    assert (await work).json()["choices"][0]["text"] == rig.answer
    await rig.until(lambda: leaving.worker_id not in rig.gateway.model("stub")._channels)


async def test_the_gateway_tries_until_a_worker_takes_it(rig):
    await rig.start(running=False)
    work = asyncio.create_task(rig.complete())
    await rig.until(lambda: any(w.running for w in rig.workers))
    [worker] = [w for w in rig.workers if w.running]
    [other] = [w for w in rig.workers if w is not worker]
    other.rejection, other.rejection_status = "this worker is loading", 503
    worker.vanish()
    await rig.until(lambda: bool(other.batches))
    other.rejection = None
    await rig.until(lambda: bool(other.running))
    finish(other)
    assert (await work).status_code == 200
    assert all(submit.is_resubmitted for submit in rig.submits()[1:])
    attempts = [submit.attempt for submit in sorted(rig.submits(), key=lambda s: s.attempt)]
    assert len(set(attempts)) == len(attempts) >= 3


async def test_a_refusal_after_a_loss_is_not_the_last_word(rig, events):
    """Its grammar was accepted by the failed worker: another one may just have been too slow."""
    await rig.start(running=False)
    schema = {"json": {"type": "integer"}}
    work = asyncio.create_task(rig.complete(structured_outputs=schema, stream=True))
    await rig.until(lambda: any(w.running for w in rig.workers))
    [lost] = [w for w in rig.workers if w.running]
    [other] = [w for w in rig.workers if w is not lost]
    lost.step()
    other.rejection, other.rejection_status = "structured_outputs: json takes longer", 400
    other.rejection_param = "structured_outputs"
    lost.vanish()
    await rig.until(lambda: bool(other.batches))
    await rig.until(lambda: len(other.batches) > 1 or work.done())
    assert not work.done()
    other.rejection = None
    await rig.until(lambda: bool(other.running))
    finish(other)
    assert pieces(events(await work)) == {0: rig.answer}


async def test_after_a_refusal_the_next_worker_is_tried_at_once(rig, monkeypatch):
    monkeypatch.setattr(placing, "FIRST_PAUSE_S", 60.0)
    monkeypatch.setattr(placing, "LAST_PAUSE_S", 60.0)
    await rig.start(running=False)
    work = asyncio.create_task(rig.complete(structured_outputs={"regex": "a"}))
    await rig.until(lambda: any(w.running for w in rig.workers))
    [lost] = [w for w in rig.workers if w.running]
    [other] = [w for w in rig.workers if w is not lost]
    lost.step()
    other.rejection, other.rejection_status = "structured_outputs: regex takes longer", 400
    other.compiled.clear()
    lost.crash()
    await rig.until(lambda: bool(other.batches))
    lost.send(lost.snapshot())  # rebuilt
    await rig.until(lambda: len(rig.attached()) == 2)
    other.compiled.set()
    await rig.until(lambda: bool(lost.running) or work.done())
    finish(lost)
    assert (await work).json()["choices"][0]["text"] == rig.answer
