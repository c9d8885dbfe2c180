"""Rig: a gateway with stub workers, and an ASGI client for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from router.api.app import create_app
from router.api.http.body import BodyLimits
from router.api.http.client_streams import StreamLimits
from router.config import GatewayConfig, ModelRoute, RoutingConfig
from router.gateway import Gateway
from router.peers import Peers
from tests.support.router.stub_worker import StubTransport, StubWorker
from worker.protocol.messages import Submit
from worker.protocol.options import from_options
from worker.protocol.text.tokenizer import Tokenizer
from worker.protocol.tracing import Tracing

CHATML = (
    "{%- for message in messages %}"
    "{%- if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message.role) }}{%- endif %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
    "{%- if thinking %}{{ '<think>' }}{%- endif %}"
)
CORPUS = [
    "hello world, the quick brown fox jumps over the lazy dog. one two three four five six",
    "system user assistant hello there, wörld 🙂 привет. the answer is forty-two!",
]


def build_checkpoint(folder: Path, corpus: Sequence[str] = CORPUS) -> None:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    backend.train_from_iterator(corpus, trainer)
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|endoftext|>", "eos_token": {"content": "<|im_end|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(CHATML)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_k": 20}))


class Rig:
    """A gateway with stub workers, and an ASGI client for it."""

    def __init__(self, checkpoint: Path, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.answer = "hello world, the quick brown fox"
        self.workers = [StubWorker(f"w{i}", self.script) for i in range(2)]
        self.transport = StubTransport(*self.workers)
        route = ModelRoute(name="stub", model=str(checkpoint), aliases=("alias",))
        self.config = GatewayConfig(models=(route,))
        self.tasks: list[asyncio.Task[None]] = []
        self.tracing: Tracing | None = None
        self.body_limits: BodyLimits | None = None
        self.stream_limits: StreamLimits | None = None
        self.peers: Peers | None = None
        self.gateway: Gateway
        self.client: httpx.AsyncClient

    def script(self, submit: Submit) -> list[int]:
        return [*self.tokenizer.encode(self.answer), 2]

    async def start(
        self,
        *,
        running: bool = True,
        attached: int = 2,
        routing: RoutingConfig | None = None,
        **config: object,
    ) -> None:
        fields = {"models": self.config.models, **config}
        if routing is not None:
            fields["models"] = tuple(replace(m, routing=routing) for m in self.config.models)
        self.config = from_options(GatewayConfig, fields)
        self.gateway = Gateway(
            self.config, {"stub": self.transport}, self.tracing, peers=self.peers
        )
        await self.gateway.start()
        self.app = create_app(self.gateway, self.body_limits, self.stream_limits)
        asgi = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=asgi, base_url="http://gateway", timeout=120)
        if running:
            self.tasks = [asyncio.create_task(worker.run()) for worker in self.workers]
        await self.until(lambda: len(self.attached()) == attached)

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        if hasattr(self, "gateway"):
            await self.gateway.close()
            await self.client.aclose()

    def attached(self) -> list[str]:
        model = self.gateway.model("stub")
        return [worker.worker_id for worker in model.fleet.workers if worker.info is not None]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(120):
            while not condition():
                await asyncio.sleep(0.002)

    async def chat(self, text: str = "hi", **fields: object) -> httpx.Response:
        body = {"model": "stub", "messages": [{"role": "user", "content": text}], **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    async def complete(self, prompt: object = "hi", **fields: object) -> httpx.Response:
        body = {"model": "stub", "prompt": prompt, "max_tokens": 100, **fields}
        return await self.client.post("/v1/completions", json=body)

    def submits(self) -> list[Submit]:
        batches = [batch for worker in self.workers for batch in worker.batches]
        return [submit for batch in batches for submit in batch.submits]

    @asynccontextmanager
    async def server(self, **settings: Any) -> AsyncIterator[str]:
        """Serves the gateway over HTTP with these uvicorn settings; returns the base URL."""
        config = uvicorn.Config(self.app, host="127.0.0.1", port=0, log_level="warning", **settings)
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve())
        await self.until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            await task


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON events of a stream, which must end in [DONE]."""
    lines = [line[6:] for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
