"""LoRA adapters from HTTP to an engine's processes, without Ray: loaded and replaced under
traffic."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.api.app import create_app
from router.config import AccessConfig, GatewayConfig, ModelRoute
from router.gateway import Gateway
from tests.support.checkpoints.adapters import write_adapter
from tests.support.paths import DEMO
from worker.config import EngineConfig
from worker.core.loop import serve_engine
from worker.frontend.server import WorkerFrontend

pytestmark = [pytest.mark.slow, pytest.mark.long]

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "cpu_threads": 1,
    "kv_cache_tokens": 4096,
    "max_num_seqs": 8,
    "step_timeout_s": 60.0,
}


class LocalTransport:
    """Calls of a gateway to frontends in the same process."""

    def __init__(self, front: WorkerFrontend) -> None:
        self.front = front

    async def attach(
        self, worker_id: str, gateway_id: str, on_item: Callable[[bytes], None]
    ) -> None:
        async for item in self.front.attach(gateway_id):
            on_item(item)

    async def submit(self, worker_id: str, payload: bytes) -> bytes:
        return await self.front.submit(payload)

    async def heartbeat(self, worker_id: str) -> bytes:
        return str(time.monotonic()).encode()

    def watch_workers(self, on_change: Callable[[tuple[str, ...]], None]) -> None:
        on_change((self.front.worker_id,))


async def test_adapters_are_replaced_under_traffic(tmp_path: Path) -> None:
    folders = [
        str(write_adapter(DEMO, tmp_path / str(number), 4, seed=number)) for number in range(3)
    ]
    modules = (f"static={folders[0]}",)
    config = EngineConfig.of(
        model=str(DEMO), enable_lora=True, max_cpu_loras=2, lora_modules=modules, **OPTIONS
    )
    front = WorkerFrontend("w", step_timeout_s=config.step_timeout_s)
    engine = threading.Thread(target=serve_engine, args=(config, front.open()), daemon=True)
    engine.start()
    route = ModelRoute(name="demo", model=str(DEMO), enable_lora=True, lora_modules=("static",))
    access = AccessConfig(admin_api_key="omega")
    gateway = Gateway(
        GatewayConfig(models=(route,), access=access), {"demo": LocalTransport(front)}
    )
    await front.wait_ready()
    await gateway.start()
    assert await gateway.wait_ready(30.0)
    client = httpx.AsyncClient(
        transport=httpx.ASGITransport(app=create_app(gateway)),
        base_url="http://gateway",
        timeout=120,
    )

    async def ask(model: str) -> str:
        body = {"model": model, "prompt": "What is 12 + 30? " * 4, "max_tokens": 12}
        body |= {"temperature": 0, "ignore_eos": True}
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])

    async def load(number: int) -> None:
        body = {"lora_name": "french", "lora_path": folders[number], "load_inplace": True}
        headers = {"authorization": "Bearer omega"}
        response = await client.post("/v1/load_lora_adapter", json=body, headers=headers)
        assert response.status_code == 200, response.text

    async def traffic() -> list[str]:
        return [await ask("french") for _ in range(8)]

    await load(1)
    names = ("demo", "static", "french")
    alone = [await ask(name) for name in names]
    assert len(set(alone)) == 3
    assert await asyncio.gather(*map(ask, names * 3)) == alone * 3
    clients = [asyncio.create_task(traffic()) for _ in range(3)]
    await asyncio.sleep(0.1)
    await load(2)
    newest = await ask("french")
    answers = {answer for task in clients for answer in await task}
    assert answers <= {alone[2], newest}
    assert newest not in alone
    await client.aclose()
    await gateway.close()
    front.close()
    await asyncio.to_thread(engine.join, 30.0)
