"""A gateway keeps no memory of completed requests, however they ended."""

from __future__ import annotations

import asyncio
import gc
import logging
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from tests.support.router.rig import CHATML, Rig, build_checkpoint
from worker.protocol.text.tokenizer import load_tokenizer

PROMPTS = 8
"""Number of different prompts. Caches of prompts have their own bounds."""
WARM_ROUNDS, ROUNDS = 70, 20
MOST_BYTES = 64.0
"""Bytes kept per request; an id alone takes over 80."""
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
FIELDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "streamed": {"stream": True, "stream_options": {"include_usage": True}},
    "many": {"n": 3, "logprobs": True, "top_logprobs": 2},
    "grammar": {"structured_outputs": {"regex": "h[a-z ,]*"}},
    "tools": {"tools": [WEATHER], "stream": True},
    "left": {"stream": True},
    "malformed": {"temperature": "hot"},
    "failed": {},
}
TEMPLATE = "{% if tools %}{{ '<tool_call>' + tools[0].function.name + '</tool_call>' }}{% endif %}"
CALL = 'I look. <tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
STATUS = {"malformed": 400, "failed": 503}


async def post(rig: Rig, client: httpx.AsyncClient, kind: str) -> None:
    """A round of requests of one kind, one after another: concurrently, the client keeps more."""
    for number in range(PROMPTS):
        body = {
            "model": "stub",
            "messages": [{"role": "user", "content": f"the answer {number}"}],
            **FIELDS[kind],
        }
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == STATUS.get(kind, 200)
            async for _ in response.aiter_raw():
                if kind == "left":
                    break
    for worker in rig.workers:
        await rig.until(lambda worker=worker: not worker.running)
        worker.batches.clear()
        worker.aborted.clear()


@pytest.fixture
def traced(frozen_heap: None) -> Iterator[None]:
    logging.disable(logging.CRITICAL)  # pytest keeps log records
    tracemalloc.start()
    yield
    logging.disable(logging.NOTSET)
    tracemalloc.stop()


def traced_bytes() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """A gateway for a model with tools; not started yet."""
    build_checkpoint(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE + CHATML)
    return Rig(tmp_path, load_tokenizer(str(tmp_path)))


@pytest.mark.long
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("kind", FIELDS)
def test_nothing_of_a_request_stays_once_it_has_ended(rig: Rig, kind: str) -> None:
    """By number of requests, not by hours: a leak shows after some hundred."""

    async def kept() -> float:
        await rig.start()
        rig.answer = CALL if kind == "tools" else "hello world"
        for worker in rig.workers:
            worker.rejection = "full" if kind == "failed" else None
            worker.rejection_is_final = True
        # uvicorn keeps a connection that its client has closed until its keep-alive timeout.
        async with (
            rig.server(timeout_keep_alive=0 if kind == "left" else 60) as url,
            httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client,
        ):
            for _ in range(WARM_ROUNDS):
                await post(rig, client, kind)
            before = traced_bytes()
            for _ in range(ROUNDS):
                await post(rig, client, kind)
            after = traced_bytes()
        await rig.stop()
        return (after - before) / (ROUNDS * PROMPTS)

    assert uvloop.run(asyncio.wait_for(kept(), 600)) < MOST_BYTES
