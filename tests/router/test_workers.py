"""Placement, failures, retries, coalescing and disconnects, with stub workers."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from router.config import RoutingConfig


async def test_second_request_goes_to_the_holder_of_its_prefix(rig):
    await rig.start(routing=RoutingConfig(explain_routing=True))
    text = "the quick brown fox jumps over the lazy dog. " * 3
    first = await rig.chat(text)
    holder = first.headers["x-rayfleet-worker"]
    num_blocks = first.json()["usage"]["prompt_tokens"] // 4
    fleet = rig.gateway.model("stub").fleet
    await rig.until(lambda: fleet.index.num_blocks(holder) == num_blocks)
    for _ in range(3):
        again = await rig.chat(text)
        assert again.headers["x-rayfleet-worker"] == holder
        cached = again.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= num_blocks * 4 - 4
        assert int(again.headers["x-rayfleet-achievable-hit-tokens"]) == cached
    for number in range(8):
        salted = await rig.chat(text, cache_salt=f"salt {number}")
        assert salted.headers["x-rayfleet-achievable-hit-tokens"] == "0"
        assert salted.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_index_is_emptied_when_the_rank_group_restarts(rig):
    await rig.start()
    response = await rig.chat("hello there, wörld " * 3)
    fleet = rig.gateway.model("stub").fleet
    [holder] = [w for w in rig.workers if w.worker_id == response.headers["x-rayfleet-worker"]]
    await rig.until(lambda: fleet.index.num_blocks(holder.worker_id) > 0)
    holder.crash()
    await rig.until(lambda: fleet.index.num_blocks(holder.worker_id) == 0)
    assert holder.worker_id not in rig.attached()
    holder.send(holder.snapshot())
    await rig.until(lambda: len(rig.attached()) == 2)
    assert len(fleet.index) == 0


async def test_requests_that_arrive_together_are_spread(rig):
    await rig.start(running=False)
    works = [asyncio.create_task(rig.chat(f"{i}")) for i in range(8)]
    await rig.until(lambda: len(rig.submits()) == 8)
    assert [len(worker.running) for worker in rig.workers] == [4, 4]
    for worker in rig.workers:
        while worker.running:
            worker.step()
    responses = await asyncio.gather(*works)
    assert all(response.status_code == 200 for response in responses)
    fleet = rig.gateway.model("stub").fleet
    assert all(not w.reservations and w.reserved_tokens == 0 for w in fleet.workers)


async def test_requests_are_counted_once_through_every_race(rig):
    """Reply before load, load before reply, tokens before the reply."""
    rig.workers[1].ready = False
    await rig.start(running=False, attached=1)
    worker = rig.workers[0]
    fleet = rig.gateway.model("stub").fleet
    state = next(iter(fleet.workers))
    works = [asyncio.create_task(rig.chat("answer first"))]
    await rig.until(lambda: bool(state.reservations) and bool(worker.running))
    await rig.until(lambda: state.reservations[next(iter(state.reservations))].ordinal == 1)
    assert state.num_active == 1
    worker.update([], [])
    await rig.until(lambda: not state.reservations)
    assert state.num_active == 1
    worker.answer_gate.clear()
    works.append(asyncio.create_task(rig.chat("load first")))
    await rig.until(lambda: len(worker.running) == 2)
    worker.update([], [])
    await rig.until(lambda: state.load.num_running == 2)
    worker.answer_gate.set()
    await rig.until(lambda: not state.reservations)
    assert state.num_active == 2
    worker.answer_gate.clear()
    works.append(asyncio.create_task(rig.chat("tokens first")))
    await rig.until(lambda: len(worker.running) == 3)
    worker.step()
    await rig.until(lambda: not state.reservations)
    assert state.num_active == 3
    worker.answer_gate.set()
    while worker.running:
        worker.step()
    assert [response.status_code for response in await asyncio.gather(*works)] == [200] * 3


async def test_rejected_and_unreachable_leave_no_booking(rig):
    await rig.start()
    fleet = rig.gateway.model("stub").fleet
    rig.workers[0].rejection = "this worker is loading"
    assert (await rig.chat()).status_code == 200
    rig.workers[0].rejection, rig.workers[0].reachable = None, False
    assert [(await rig.chat()).status_code for _ in range(2)] == [200, 200]
    await rig.until(lambda: all(not w.reservations for w in fleet.workers))
    assert all(w.reserved_tokens == 0 for w in fleet.workers)


async def test_submits_that_arrive_meanwhile_ride_on_the_next_call(rig):
    rig.workers[1].ready = False
    await rig.start(attached=1)
    worker = rig.workers[0]
    worker.gate.clear()
    works = [asyncio.create_task(rig.chat("first"))]
    await rig.until(lambda: len(worker.batches) == 1)
    works += [asyncio.create_task(rig.chat(f"{i}")) for i in range(20)]
    fleet = rig.gateway.model("stub").fleet
    await rig.until(lambda: sum(len(w.reservations) for w in fleet.workers) == 21)
    assert len(worker.batches) == 1
    worker.gate.set()
    responses = await asyncio.gather(*works)
    assert all(response.status_code == 200 for response in responses)
    assert [len(batch.submits) for batch in worker.batches] == [1, 20]


async def test_requests_of_a_lost_worker_continue_at_another(rig, events):
    await rig.start(running=False)
    works = [asyncio.create_task(rig.chat(f"{i}", stream=i % 2 == 0)) for i in range(4)]
    await rig.until(lambda: len(rig.submits()) == 4)
    for worker in rig.workers:
        worker.step()
    lost, other = rig.workers
    lost.vanish()
    await rig.until(lambda: rig.attached() == ["w1"] and len(other.running) == 4)
    while other.running:
        other.step()
    responses = await asyncio.gather(*works)
    for number, response in enumerate(responses):
        assert response.status_code == 200
        if number % 2 == 0:
            text = "".join(e["choices"][0]["delta"]["content"] for e in events(response))
        else:
            text = response.json()["choices"][0]["message"]["content"]
        assert text == rig.answer
    assert rig.gateway.model("stub").stats.resubmissions == 2


async def test_worker_that_comes_back_is_attached_again(rig):
    await rig.start()
    worker = rig.workers[0]
    worker.vanish()
    await rig.until(lambda: rig.attached() == ["w1"])
    worker.reachable, worker.epoch = True, 5
    await rig.until(lambda: len(rig.attached()) == 2)
    assert (await rig.chat()).status_code == 200


async def test_gap_in_the_stream_loses_the_worker_and_attaches_anew(rig):
    await rig.start(running=False)
    work = asyncio.create_task(rig.chat())
    await rig.until(lambda: bool(rig.submits()))
    [worker] = [w for w in rig.workers if w.running]
    worker.running.clear()
    worker.update([], [], seq=17)
    await rig.until(lambda: len(rig.submits()) == 2)
    [after] = [w for w in rig.workers if w.running]
    while after.running:
        after.step()
    assert (await work).json()["choices"][0]["message"]["content"] == rig.answer
    await rig.until(lambda: worker.num_attached == 2 and len(rig.attached()) == 2)


async def test_another_protocol_version_takes_no_requests(rig):
    rig.workers[0].protocol_version += 1
    await rig.start(attached=1)
    assert rig.attached() == ["w1"]
    response = await rig.chat()
    assert response.headers["x-rayfleet-worker"] == "w1"


async def test_unreachable_worker_costs_a_retry_not_the_request(rig):
    await rig.start()
    rig.workers[0].reachable = rig.workers[1].reachable = False
    rig.workers[1].reachable = True
    responses = [await rig.chat(f"{i}") for i in range(4)]
    assert [r.headers["x-rayfleet-worker"] for r in responses] == ["w1"] * 4
    stats = rig.gateway.model("stub").stats
    assert stats.retries >= 1
    assert any(submit.attempt == 1 for submit in rig.workers[1].batches[0].submits)


async def test_rejecting_worker_costs_a_retry_too(rig):
    await rig.start()
    rig.workers[0].rejection = "this worker is loading"
    responses = [await rig.chat(f"{i}") for i in range(4)]
    assert [r.headers["x-rayfleet-worker"] for r in responses] == ["w1"] * 4
    rig.workers[1].rejection = "so is this one"
    response = await rig.chat()
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "service_unavailable_error"


async def test_worker_lost_while_a_submit_is_in_flight(rig):
    await rig.start()
    stuck = rig.workers[0]
    stuck.gate.clear()
    works = [asyncio.create_task(rig.chat(f"{i}")) for i in range(4)]
    await rig.until(lambda: bool(stuck.batches))
    stuck.vanish()
    responses = await asyncio.gather(*works)
    assert [r.headers["x-rayfleet-worker"] for r in responses] == ["w1"] * 4


async def test_leaving_worker_finishes_its_requests_and_takes_no_new_ones(rig):
    await rig.start(running=False)
    work = asyncio.create_task(rig.chat())
    await rig.until(lambda: bool(rig.submits()))
    [leaving] = [w for w in rig.workers if w.running]
    [staying] = [w for w in rig.workers if w is not leaving]
    rig.transport.set_members(staying.worker_id)
    other = asyncio.create_task(rig.chat())
    await rig.until(lambda: bool(staying.running))
    for worker in rig.workers:
        while worker.running:
            worker.step()
    assert (await work).json()["choices"][0]["message"]["content"] == rig.answer
    assert (await other).headers["x-rayfleet-worker"] == staying.worker_id
    await rig.until(lambda: rig.attached() == [staying.worker_id])


async def test_requests_wait_for_a_worker_that_takes_the_last_ones_place(rig):
    """In a rolling update one worker leaves just as the next one joins."""
    leaving, coming = rig.workers
    coming.door.clear()
    await rig.start(attached=1)
    rig.transport.set_members(coming.worker_id)
    works = [asyncio.create_task(rig.chat(f"{i}", stream=i % 2 == 0)) for i in range(4)]
    await rig.until(lambda: rig.gateway.model("stub").stats.pending_requests == 4)
    assert not leaving.batches
    coming.door.set()
    for response in await asyncio.gather(*works):
        assert response.status_code == 200
        assert response.headers["x-rayfleet-worker"] == coming.worker_id


async def test_requests_wait_while_the_only_worker_is_replaced(rig):
    """Without room for a second one, it exits before the next starts to load."""
    leaving, coming = rig.workers
    rig.transport.set_members_quietly(leaving.worker_id)
    await rig.start(attached=1)
    assert (await rig.chat()).status_code == 200
    rig.transport.set_members()
    works = [asyncio.create_task(rig.chat(f"{i}")) for i in range(3)]
    model = rig.gateway.model("stub")
    await rig.until(lambda: model.stats.pending_requests == 3 and not rig.attached())
    rig.transport.set_members(coming.worker_id)
    for response in await asyncio.gather(*works):
        assert response.headers["x-rayfleet-worker"] == coming.worker_id


async def test_they_do_not_wait_for_ever(rig):
    await rig.start(routing=RoutingConfig(no_worker_timeout_s=0.05))
    rig.transport.set_members()
    await rig.until(lambda: not rig.attached())
    assert (await rig.chat()).status_code == 503


async def test_nobody_waits_for_a_worker_that_has_left_unseen(rig):
    rig.workers[0].door.clear()
    rig.workers[1].ready = False
    await rig.start(attached=0)
    work = asyncio.create_task(rig.chat())
    await rig.until(lambda: rig.gateway.model("stub").stats.pending_requests == 1)
    assert not await rig.gateway.wait_ready(0.0)
    rig.transport.set_members(rig.workers[1].worker_id)
    assert (await work).status_code == 503


async def test_a_gateway_knows_when_it_has_a_worker(rig):
    for worker in rig.workers:
        worker.door.clear()
    await rig.start(attached=0)
    waiting = asyncio.create_task(rig.gateway.wait_ready(10.0))
    rig.workers[0].door.set()
    assert await waiting


@pytest.mark.usefixtures("short_ticks")
async def test_silent_worker_is_lost(rig):
    await rig.start(running=False)
    work = asyncio.create_task(rig.chat())
    await rig.until(lambda: bool(rig.submits()))
    [silent] = [w for w in rig.workers if w.running]
    [other] = [w for w in rig.workers if w is not silent]
    rig.tasks = [asyncio.create_task(other.run())]
    response = await work
    assert response.json()["choices"][0]["message"]["content"] == rig.answer
    assert response.headers["x-rayfleet-worker"] == other.worker_id
    await rig.until(lambda: silent.num_attached == 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_goes_away_frees_the_worker(rig, stream):
    await rig.start(running=False)
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": stream}
    async with rig.server() as url, httpx.AsyncClient(base_url=url) as client:
        work = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await rig.until(lambda: bool(rig.submits()))
        [worker] = [w for w in rig.workers if w.running]
        worker.step()
        work.cancel()
        async with asyncio.timeout(120):
            await worker.wait(lambda: bool(worker.aborted))
        assert worker.aborted == [rig.submits()[0].request_id]
        assert worker.running == {}
    fleet = rig.gateway.model("stub").fleet
    assert all(not w.reservations for w in fleet.workers)


async def test_client_that_goes_away_before_the_submit_left(rig):
    rig.workers[1].ready = False
    await rig.start(attached=1)
    worker = rig.workers[0]
    worker.gate.clear()
    async with rig.server() as url, httpx.AsyncClient(base_url=url) as client:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        first = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await rig.until(lambda: bool(worker.batches))
        second = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        fleet = rig.gateway.model("stub").fleet
        await rig.until(lambda: sum(len(w.reservations) for w in fleet.workers) == 2)
        second.cancel()
        await rig.until(lambda: sum(len(w.reservations) for w in fleet.workers) == 1)
        worker.gate.set()
        assert (await first).status_code == 200
    assert len(rig.submits()) == 1


async def test_official_client(rig):
    import openai

    await rig.start()
    async with (
        rig.server() as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
    ):
        messages = [{"role": "user", "content": "hello"}]
        answer = await client.chat.completions.create(model="stub", messages=messages)
        assert answer.choices[0].message.content == rig.answer
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        stream = await client.chat.completions.create(
            model="stub", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
        assert "".join(pieces) == rig.answer
        assert chunks[-1].usage.completion_tokens == len(rig.script(None))
        texts = await client.completions.create(model="stub", prompt=["a", "b"], max_tokens=3)
        assert [choice.finish_reason for choice in texts.choices] == ["length", "length"]
        assert [model.id async for model in client.models.list()] == ["stub", "alias"]
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="nope", messages=messages)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="stub", messages=messages, temperature=-1)
        assert caught.value.param == "temperature"


async def test_official_client_sees_errors_in_the_stream(rig):
    import openai

    await rig.start(running=False, routing=RoutingConfig(max_request_attempts=1))
    async with (
        rig.server() as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
    ):
        opening = asyncio.create_task(
            client.chat.completions.create(
                model="stub", messages=[{"role": "user", "content": "hi"}], stream=True
            )
        )
        await rig.until(lambda: any(w.running for w in rig.workers))
        [worker] = [w for w in rig.workers if w.running]
        worker.step()
        stream = await opening
        worker.crash()
        with pytest.raises(openai.APIError, match="rank 0 was killed"):
            async for _ in stream:
                pass


async def test_gateway_that_closes_ends_its_requests(rig):
    await rig.start(running=False)
    work = asyncio.create_task(rig.chat())
    await rig.until(lambda: bool(rig.submits()))
    await rig.gateway.close()
    assert "shutting down" in (await work).json()["error"]["message"]
