"""Paths of a stream's messages: start and end through all middleware, parts around it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

import pytest

from cluster.connections import ReadableHeaders

Message = MutableMapping[str, Any]


class Wrapper:
    """Middleware that records messages, like Serve's inside of ReadableHeaders."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.passed: list[Message] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def noted(message: Message) -> None:
            self.passed.append(message)
            await send(message)

        await self.app(scope, receive, noted)


async def post(app: Any, **fields: object) -> list[Message]:
    """All messages sent to a server."""
    sent: list[Message] = []
    body: bytes | None = json.dumps({"model": "stub", "prompt": "hi", **fields}).encode()

    async def receive() -> Message:
        nonlocal body
        if body is None:
            await asyncio.Event().wait()
        whole, body = body, None
        return {"type": "http.request", "body": whole, "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    path = "/v1/completions"
    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
    await app(scope, receive, send)
    return sent


async def test_parts_go_to_the_server_and_head_and_end_by_all_that_wraps_it(rig):
    await rig.start()
    wrapper = Wrapper(rig.app)
    sent = await post(ReadableHeaders(wrapper), stream=True, max_tokens=100)
    assert [m["type"] for m in wrapper.passed] == ["http.response.start", "http.response.body"]
    assert wrapper.passed == [sent[0], sent[-1]]
    assert [m["more_body"] for m in sent[1:]] == [True] * (len(sent) - 2) + [False]
    assert len(sent) > 4
    events = b"".join(m["body"] for m in sent[1:]).decode().split("\n\n")
    texts = [json.loads(e[6:])["choices"][0]["text"] for e in events if e.startswith("data: {")]
    assert "".join(texts) == rig.answer


@pytest.mark.parametrize("fields", [{"stream": False}, {"stream": True, "max_tokens": 1}])
async def test_an_answer_of_one_piece_goes_by_all_of_it(rig, fields):
    await rig.start()
    wrapper = Wrapper(rig.app)
    sent = await post(ReadableHeaders(wrapper), **fields)
    assert wrapper.passed == sent
    assert len(sent) == 2


async def test_without_the_outermost_middleware_parts_go_by_the_rest(rig):
    await rig.start()
    wrapper = Wrapper(rig.app)
    assert await post(wrapper, stream=True, max_tokens=100) == wrapper.passed


async def test_a_request_does_not_send_to_the_one_before_it(rig):
    """Requests of one connection run one after another on one event loop."""
    await rig.start()
    app = ReadableHeaders(rig.app)
    first = await post(app, stream=True, max_tokens=100)
    number = len(first)
    both = await asyncio.gather(*(post(app, stream=True, max_tokens=100) for _ in range(2)))
    assert len(first) == number
    for sent in both:
        assert b"[DONE]" in sent[-1]["body"]
        assert [m["type"] for m in sent].count("http.response.start") == 1
