"""A small OpenAI-like server with known counts, for the load client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from aiohttp import web

from tests.support.cluster.openai_backend import Backend


@pytest.fixture
def backend() -> Iterator[Backend]:
    """A running Backend on a free port of 127.0.0.1."""
    backend = Backend()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> web.AppRunner:
        runner = web.AppRunner(backend.app())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        backend.url = f"http://{host}:{port}"
        return runner

    runner = asyncio.run_coroutine_threadsafe(start(), loop).result(120)
    yield backend
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(120)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(120)
    loop.close()
