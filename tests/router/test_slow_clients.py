"""Clients that read slowly or disconnect, at every moment of a response."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

import pytest

from router.api.http.client_streams import StreamLimits
from router.config import RoutingConfig
from router.serving import ServedModel


class SlowClient:
    """Sends ASGI requests to the app; receives each body chunk only when `gate` is open."""

    def __init__(self, rig: Any, body: dict[str, Any]) -> None:
        self.gate = asyncio.Event()
        self.sent: list[MutableMapping[str, Any]] = []
        self.waiting = False
        self.gone = asyncio.Event()
        self._body: bytes | None = json.dumps(body).encode()
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": [],
            "query_string": b"",
        }
        self.task = asyncio.create_task(rig.app(self.scope, self.receive, self.send))

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.sent.append(message)
        self.waiting = True
        await self.gate.wait()
        self.waiting = False

    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()


def ended(model: ServedModel) -> dict[str, int]:
    return {reason: count for reason, count in model.stats.finished.items() if count}


def request(**fields: object) -> dict[str, Any]:
    return {"model": "stub", "prompt": "hi", "max_tokens": 100, "stream": True, **fields}


async def test_end_that_comes_while_the_client_is_slow_is_not_lost(rig):
    await rig.start(running=False)
    client = SlowClient(rig, request())
    await rig.until(lambda: bool(rig.submits()))
    [worker] = [w for w in rig.workers if w.running]
    worker.step()
    await rig.until(lambda: client.waiting)
    while worker.running:
        worker.step()
    fleet = rig.gateway.model("stub")
    await rig.until(lambda: ended(fleet) == {"stop": 1})
    client.gate.set()
    await client.task
    *events, done = [e.removeprefix("data: ") for e in client.text().split("\n\n") if e]
    choices = [json.loads(event)["choices"][0] for event in events]
    assert done == "[DONE]"
    assert "".join(choice["text"] for choice in choices) == rig.answer
    assert choices[-1]["finish_reason"] == "stop"


async def test_an_error_during_a_slow_read_is_sent(rig):
    await rig.start(running=False, routing=RoutingConfig(max_request_attempts=1))
    client = SlowClient(rig, request())
    await rig.until(lambda: bool(rig.submits()))
    [worker] = [w for w in rig.workers if w.running]
    worker.step()
    await rig.until(lambda: client.waiting)
    worker.crash()
    await rig.until(lambda: ended(rig.gateway.model("stub")) == {"error": 1})
    client.gate.set()
    await client.task
    assert "rank 0 was killed" in client.text()
    assert "[DONE]" not in client.text()


async def test_slow_client_holds_up_nobody_and_gets_few_large_pieces(rig):
    await rig.start()
    rig.answer = "hello world, the quick brown fox jumps over the lazy dog. " * 20
    slow = SlowClient(rig, request(max_tokens=2000))
    await rig.until(lambda: slow.waiting)
    for _ in range(5):
        assert (await rig.complete(max_tokens=2000)).json()["choices"][0]["text"] == rig.answer
    await rig.until(lambda: ended(rig.gateway.model("stub")) == {"stop": 6})
    slow.gate.set()
    await slow.task
    assert len(slow.sent) <= 4
    assert slow.text().count("data: ") <= 4


async def test_error_before_the_response_begins_is_an_error(rig):
    """The worker accepts the request and exits before the response's task runs again."""
    await rig.start(running=False, routing=RoutingConfig(max_request_attempts=1))
    for stream in (False, True):
        work = asyncio.create_task(rig.complete(stream=stream))
        await rig.until(lambda: any(w.running for w in rig.workers))
        [worker] = [w for w in rig.workers if w.running]
        model = rig.gateway.model("stub")
        [channel] = [c for c in model._channels.values() if c._in_flight]
        [request] = channel._in_flight.values()
        await rig.until(lambda request=request: request.ack.done())
        worker.running.clear()
        channel._lose_in_flight("gone", before=None)
        response = await work
        assert "failed: gone" in response.text
        assert '"error"' in response.text


async def test_one_failing_choice_fails_the_request_and_aborts_the_others(rig):
    await rig.start(running=False, routing=RoutingConfig(max_request_attempts=1))
    for stream in (False, True):
        for worker in rig.workers:
            worker.running.clear()
            worker.aborted.clear()
            worker.update([], [])
        work = asyncio.create_task(rig.complete(n=4, stream=stream))
        await rig.until(lambda: sum(len(w.running) for w in rig.workers) == 4)
        for worker in rig.workers:
            worker.step()
        failing, other = rig.workers
        others = set(other.running)
        failing.crash()
        response = await work
        assert "rank 0 was killed" in response.text
        assert response.status_code == 500  # also for a stream that has not started
        await rig.until(lambda worker=other, others=others: set(worker.aborted) == others)
        failing.send(failing.snapshot())
        await rig.until(lambda: len(rig.attached()) == 2)


async def test_client_that_goes_away_while_sending_its_body(rig):
    await rig.start()
    scope = SlowClient(rig, request()).scope
    parts = [
        {"type": "http.request", "body": b'{"prompt"', "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return parts.pop(0)

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await rig.app(scope, receive, send)
    assert all(message.get("status", 400) == 400 for message in sent)


async def test_client_that_goes_away_is_not_written_to_for_ever(rig):
    await rig.start(running=False)
    client = SlowClient(rig, request())
    client.gate.set()
    await rig.until(lambda: bool(rig.submits()))
    [worker] = [w for w in rig.workers if w.running]
    worker.step()
    client.gone.set()
    async with asyncio.timeout(120):
        await client.task
        await worker.wait(lambda: bool(worker.aborted))


async def test_client_that_goes_away_while_its_submit_is_in_flight(rig):
    """The abort is sent after the submit; the late reply changes nothing."""
    await rig.start(running=False)
    for stream in (False, True):
        for worker in rig.workers:
            worker.answer_gate.clear()
            worker.aborted.clear()
        client = SlowClient(rig, request(stream=stream))
        client.gate.set()
        await rig.until(lambda: any(w.running for w in rig.workers))
        [worker] = [w for w in rig.workers if w.running]
        client.gone.set()
        await client.task
        assert all(not w.reservations for w in rig.gateway.model("stub").fleet.workers)
        worker.answer_gate.set()
        await rig.until(lambda worker=worker: bool(worker.aborted))
        assert worker.running == {}


async def test_abort_and_end_cross(rig):
    """The end is in flight when the stop string is found: one end, no error, one count."""
    await rig.start(running=False)
    work = asyncio.create_task(rig.complete(stop=["hello"]))
    await rig.until(lambda: bool(rig.submits()))
    [worker] = [w for w in rig.workers if w.running]
    while worker.running:  # all at once: the gateway has not processed any yet
        worker.step()
    [choice] = (await work).json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", "hello")
    assert ended(rig.gateway.model("stub")) == {"stop": 1}
    assert all(not w.reservations for w in rig.gateway.model("stub").fleet.workers)


async def stuck(rig: Any, **fields: object) -> SlowClient:
    """A client that never receives the head of its stream."""
    client = SlowClient(rig, request(**fields))
    await rig.until(lambda: client.waiting)
    return client


async def test_client_that_reads_nothing_is_disconnected(rig):
    rig.stream_limits = StreamLimits(stalled_s=0.1, period_s=0.02)
    await rig.start(running=False)
    work = asyncio.create_task(stuck(rig, n=4))
    await rig.until(lambda: sum(len(w.running) for w in rig.workers) == 4)
    for worker in rig.workers:
        worker.step()
    client = await work
    async with asyncio.timeout(120):
        await client.task
    assert client.text() == ""
    # None of them keeps computing for it.
    await rig.until(lambda: sum(len(w.aborted) for w in rig.workers) == 4)
    assert ended(rig.gateway.model("stub")) == {"abort": 4}


async def test_client_that_reads_nothing_of_a_whole_response_is_disconnected(rig):
    rig.stream_limits = StreamLimits(stalled_s=0.1, period_s=0.02, unread_bytes=1)
    await rig.start()
    client = await stuck(rig, stream=False)
    async with asyncio.timeout(120):
        await client.task
    assert client.text() == ""


async def test_client_that_reads_slowly_is_not_disconnected(rig, monkeypatch):
    """It reads a piece every 40 s: only the time between two of them counts."""
    rig.stream_limits = StreamLimits(stalled_s=60.0, period_s=0.01)
    await rig.start()
    client = await stuck(rig)
    await rig.until(lambda: ended(rig.gateway.model("stub")) == {"stop": 1})
    loop, passed_s = asyncio.get_running_loop(), 0.0
    clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock() + passed_s)
    while not client.task.done():
        passed_s += 40.0
        await asyncio.sleep(0.05)
        assert client.waiting
        client.gate.set()
        client.gate.clear()  # one message passes
        await asyncio.sleep(0.05)
    assert passed_s > 60.0
    assert client.text().endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("limit", ["unread_bytes", "total_unread_bytes"])
async def test_what_is_left_unread_has_a_limit(rig, limit):
    """A stream of plain text survives; one with log-probabilities, of 272 bytes each, is
    aborted."""
    rig.stream_limits = StreamLimits(period_s=0.02, **{limit: 50_000})
    rig.answer = "hello world, the quick brown fox jumps over the lazy dog. " * 10
    await rig.start()
    small = await stuck(rig, max_tokens=2000)
    large = await stuck(rig, max_tokens=2000, logprobs=5, n=4)
    async with asyncio.timeout(120):
        await large.task
    assert not small.task.done()
    small.gate.set()
    async with asyncio.timeout(120):
        await small.task
    assert small.text().endswith("data: [DONE]\n\n")
