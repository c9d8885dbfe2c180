"""Streams without output are kept alive; errors before that keep their HTTP status."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from router.api.http.client_streams import StreamLimits
from router.api.responses import writer
from router.api.responses.background import EventLog
from tests.support.router.rig import Rig

SOON = StreamLimits(accepted_ping_s=0.02, unplaced_ping_s=0.02, ping_s=0.02)
USER = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "hello"},
    "/v1/messages": {"messages": USER, "max_tokens": 200},
    "/v1/responses": {"input": "hello"},
}


@pytest.fixture
async def waiting(agent: Rig) -> Rig:
    """A gateway that pings soon, whose workers do not run."""
    await agent.stop()
    agent.stream_limits = SOON
    await agent.start(running=False)
    return agent


def begin(rig: Rig, path: str, **fields: Any) -> asyncio.Task[httpx.Response]:
    body = {"model": "stub", "stream": True, **BODIES[path], **fields}
    return asyncio.create_task(rig.client.post(path, json=body))


async def finish(rig: Rig, request: asyncio.Task[httpx.Response]) -> httpx.Response:
    for worker in rig.workers:
        rig.tasks.append(asyncio.create_task(worker.run()))
    return await request


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line[6:] for line in response.text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def num_pings(response: httpx.Response) -> int:
    pings = sum(event.get("type") in ("ping", "keepalive") for event in events_of(response))
    return response.text.count(": ping\n\n") - response.text.count("event: ping\n\n") + pings


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("is_placed", [True, False])
async def test_requests_that_wait_are_pinged(waiting: Rig, path: str, is_placed: bool) -> None:
    if not is_placed:
        for worker in waiting.workers:
            worker.gate.clear()
    request = begin(waiting, path)
    await waiting.until(lambda: len(waiting.submits()) == 1)
    await asyncio.sleep(0.15)
    for worker in waiting.workers:
        worker.gate.set()
    response = await finish(waiting, request)
    assert response.status_code == 200
    assert num_pings(response) >= 2
    events = events_of(response)
    kinds = [event.get("type") for event in events]
    if path == "/v1/messages":
        assert kinds[:3] == ["message_start", "ping", "ping"]
        assert (kinds.count("message_start"), kinds[-1]) == (1, "message_stop")
        usage = events[-2]["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] > 0
    elif path == "/v1/responses":
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert (kinds.count("response.created"), kinds[-1]) == (1, "response.completed")
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
    else:
        assert response.text.startswith(": ping\n\n")
        assert response.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("path", BODIES)
async def test_errors_after_a_ping_end_the_stream(waiting: Rig, path: str) -> None:
    for worker in waiting.workers:
        worker.gate.clear()
        worker.rejection, worker.rejection_status = "the queue is full", 429
    request = begin(waiting, path)
    await waiting.until(lambda: len(waiting.submits()) == 1)
    await asyncio.sleep(0.1)
    for worker in waiting.workers:
        worker.gate.set()
    response = await finish(waiting, request)
    assert response.status_code == 200
    last = events_of(response)[-1]
    error = last["response"]["error"] if path == "/v1/responses" else last["error"]
    assert error["message"] == "the queue is full"
    codes = {
        "/v1/messages": ("type", "rate_limit_error"),
        "/v1/responses": ("code", "rate_limit_exceeded"),
    }
    field, value = codes.get(path, ("code", "queue_full"))
    assert error[field] == value


@pytest.mark.parametrize("path", BODIES)
async def test_errors_before_a_ping_keep_their_status(agent: Rig, path: str) -> None:
    for worker in agent.workers:
        worker.rejection, worker.rejection_status = "the queue is full", 429
    response = await begin(agent, path)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"


async def test_hidden_reasoning_is_pinged(waiting: Rig) -> None:
    waiting.answer = "hm " * 20 + "\n</think>\n\nyes"
    thinking = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    request = begin(waiting, "/v1/messages", thinking=thinking)
    await waiting.until(lambda: any(worker.running for worker in waiting.workers))
    [worker] = [worker for worker in waiting.workers if worker.running]
    for _ in range(4):
        worker.step()
        await asyncio.sleep(0.06)
    response = await finish(waiting, request)
    kinds = [event["type"] for event in events_of(response)]
    assert kinds.index("content_block_start") >= 4
    assert set(kinds[1 : kinds.index("content_block_start")]) == {"ping"}


async def test_long_silences_have_events_for_codex(
    waiting: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "KEEPALIVE", 2)
    request = begin(waiting, "/v1/responses")
    await asyncio.sleep(0.6)
    events = events_of(await finish(waiting, request))
    assert "keepalive" in [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


async def test_a_client_that_leaves_before_the_first_ping_ends_its_request(waiting: Rig) -> None:
    for worker in waiting.workers:
        worker.gate.clear()
    request = begin(waiting, "/v1/messages")
    await waiting.until(lambda: len(waiting.submits()) == 1)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    for worker in waiting.workers:
        worker.gate.set()
    await waiting.until(lambda: waiting.gateway.model("stub").num_open == 0)


async def test_followers_of_a_background_response_are_pinged() -> None:
    log = EventLog(0.01)
    log.add(b"event: a\ndata: {}\n\n")
    parts = log.follow(-1)
    assert await anext(parts) == b"event: a\ndata: {}\n\n"
    assert await anext(parts) == b": ping\n\n"
    log.add(b"event: b\ndata: {}\n\n")
    log.close()
    assert await anext(parts) == b"event: b\ndata: {}\n\n"
    assert [part async for part in parts] == []
    assert b"ping" not in log.events
