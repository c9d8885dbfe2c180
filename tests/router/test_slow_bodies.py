"""Clients that send their bodies slowly, or too much at once, to a real HTTP server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from router.api.http.body import BodyLimits

LONG_S = 3600.0
DEADLINE_S = 120


@asynccontextmanager
async def upload(url: str, length: int) -> AsyncIterator[tuple[Any, Any]]:
    """A connection on which a body of `length` bytes has been announced."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: gateway\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % length
    )
    try:
        yield reader, writer
    finally:
        writer.close()


async def complete(url: str, size: int = 0) -> httpx.Response:
    """A valid request, whose body has `size` bytes or slightly more."""
    body = {"model": "stub", "prompt": "hi", "max_tokens": 5, "user": "u" * size}
    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client:
        return await client.post("/v1/completions", json=body)


@pytest.mark.parametrize(
    "limits",
    [
        BodyLimits(window_s=0.2, window_bytes=100, total_s=LONG_S),
        BodyLimits(window_s=LONG_S, window_bytes=1, total_s=0.3),
    ],
    ids=["rate", "total"],
)
@pytest.mark.parametrize("sent", [b"", b'{"p'], ids=["nothing", "drops"])
async def test_a_body_that_does_not_come_ends_in_408(rig, limits, sent):
    rig.body_limits = limits
    await rig.start()
    async with rig.server() as url, upload(url, 1_000_000) as (reader, writer):
        for byte in sent:  # a byte does not extend the deadline
            writer.write(bytes([byte]))
            await asyncio.sleep(0.02)
        async with asyncio.timeout(DEADLINE_S):
            answer = await reader.readuntil(b"\r\n\r\n")
            body = await reader.read()  # to the end: the server has closed the connection
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert json.loads(body)["error"]["code"] == "request_timeout"
        assert (await complete(url)).status_code == 200


async def test_a_slow_body_that_keeps_the_rate_is_taken(rig):
    """Each part would be the last one in time if the windows did not restart."""
    rig.body_limits = BodyLimits(window_s=2.0, window_bytes=10, total_s=LONG_S)
    await rig.start()
    body = json.dumps({"model": "stub", "prompt": "hi", "max_tokens": 5}).encode()
    async with rig.server() as url, upload(url, len(body)) as (reader, writer):
        for start in range(0, len(body), 10):
            writer.write(body[start : start + 10])
            await asyncio.sleep(0.01)
        async with asyncio.timeout(DEADLINE_S):
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")


async def test_all_bodies_together_have_a_limit(rig):
    rig.body_limits = BodyLimits(bytes_in_flight=20_000)
    await rig.start()
    async with rig.server() as url:
        async with upload(url, 100_000) as (_, writer):
            writer.write(b"x" * 15_000)
            async with asyncio.timeout(DEADLINE_S):
                while (refused := await complete(url, 10_000)).status_code == 200:
                    pass
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "gateway_busy"
            assert (await complete(url)).status_code == 200
        # Bytes in flight are released with their client, and with each tokenized request.
        async with asyncio.timeout(DEADLINE_S):
            while (await complete(url, 10_000)).status_code != 200:
                pass
        for _ in range(5):
            assert (await complete(url, 15_000)).status_code == 200


async def test_streams_hold_no_bodies(rig):
    rig.body_limits = BodyLimits(bytes_in_flight=20_000)
    await rig.start(running=False)
    async with rig.server() as url:
        tasks: list[asyncio.Task[httpx.Response]] = []
        for _ in range(3):
            tasks.append(asyncio.create_task(complete(url, 15_000)))
            await rig.until(lambda: len(rig.submits()) >= len(tasks) or tasks[-1].done())
        for task in tasks:
            task.cancel()
        ended = [task.result().status_code for task in tasks if task.done()]
        assert 503 not in ended
