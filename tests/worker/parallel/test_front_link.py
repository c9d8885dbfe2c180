"""The connection between front and engine, over a real socket."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterator

import pytest
import uvloop

from worker.parallel.front_link import EngineLink, FrontLink


@pytest.fixture
def directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="rf-") as path:
        yield path


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_both_event_loops_serve(directory: str, run: Callable[..., None]) -> None:
    async def talk() -> None:
        front = FrontLink(directory)
        engine = EngineLink(directory)
        await front.accept()
        engine.send(b"report")
        assert await front.receive() == b"report"
        front.send(b"batch")
        assert await received(engine, 1) == [b"batch"]
        front.close()
        engine.close()

    run(talk())


async def received(engine: EngineLink, count: int) -> list[bytes]:
    payloads: list[bytes] = []
    while len(payloads) < count:
        payloads += engine.receive()
        await asyncio.sleep(0)
    return payloads


async def test_payloads_of_any_size_cross_in_order_both_ways(directory: str) -> None:
    front = FrontLink(directory)
    engine = EngineLink(directory)
    await front.accept()
    payloads = [bytes([size % 251]) * size for size in (0, 1, 5, 70_000, 3_000_000, 2)]
    for payload in payloads:
        front.send(payload)
    assert await received(engine, len(payloads)) == payloads
    for payload in payloads:
        await asyncio.to_thread(engine.send, payload)
    assert [await front.receive() for _ in payloads] == payloads
    engine.close()
    front.close()


async def test_what_the_engine_said_first_waits_for_the_front(directory: str) -> None:
    front = FrontLink(directory)
    front.send(b"nobody is there")
    engine = EngineLink(directory)
    engine.send(b"info")
    await front.accept()
    assert await front.receive() == b"info"
    assert engine.receive() == []
    engine.close()
    front.close()


async def test_the_engine_sees_the_end_of_its_front(directory: str) -> None:
    front = FrontLink(directory)
    engine = EngineLink(directory)
    await front.accept()
    assert engine.is_open
    front.close()
    await asyncio.to_thread(engine.wait)
    assert engine.receive() == []
    assert not engine.is_open
    engine.send(b"late")
    engine.close()


async def test_the_engine_wakes_for_other_descriptors_and_for_time(directory: str) -> None:
    front = FrontLink(directory)
    engine = EngineLink(directory)
    reader, writer = os.pipe()
    os.close(writer)
    engine.wait([reader])
    engine.wait(timeout_s=0.001)
    assert engine.is_open
    os.close(reader)
    engine.close()
    front.close()
