"""The official OpenAI client, connected to a rig's HTTP server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import openai

MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def client_of(rig: Any, api_key: str = "x") -> AsyncIterator[openai.AsyncOpenAI]:
    import openai  # 1.3 s of CPU time, of each process that collects tests

    async with (
        rig.server() as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0) as client,
    ):
        yield client
