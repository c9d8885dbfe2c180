"""A small OpenAI-compatible server with known token counts, for the load client."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Backend:
    """Answers each request with `max_tokens` chunks; records the requests."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    owned_by: str = "vllm"
    api_key: str | None = None
    cached_tokens: int = 3
    with_usage: bool = True
    fail_with: str | None = None
    """"status" rejects requests, "event" ends streams with an error event, "cut" closes the
    connection."""
    refuse_ignore_eos: bool = False
    """Whether to reject requests with ignore_eos, as OpenAI's servers do."""
    fail_every: int = 0
    """Rejects every n-th request; 0 disables it."""
    pace_s: float = 0.0
    """Seconds between events."""
    empty: int = -1
    """Index of the token whose event has no text."""
    not_ready: int = 0
    """Number of requests to `/ready` that are answered with "not ready"."""
    running: int = 0
    most_running: int = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_post("/v1/embeddings", self._embed)
        return app

    async def _ready(self, request: web.Request) -> web.Response:
        self.not_ready -= 1
        return web.Response(status=503 if self.not_ready >= 0 else 200)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "object": "list",
                "data": [{"id": "toy", "object": "model", "owned_by": self.owned_by}],
            }
        )

    async def _embed(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        usage = {"prompt_tokens": len(body["input"]), "total_tokens": len(body["input"])}
        return web.json_response({"data": [{"index": 0, "embedding": "AAAA"}], "usage": usage})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        wrong_key = request.headers.get("Authorization") != f"Bearer {self.api_key}"
        if self.fail_with == "status" or (self.api_key and wrong_key):
            return web.json_response({"error": {"message": "no"}}, status=401)
        if self.refuse_ignore_eos and "ignore_eos" in body:
            message = "ignore_eos is no field of this server"
            return web.json_response({"error": {"message": message, "code": 400}}, status=400)
        if self.fail_every and len(self.bodies) % self.fail_every == 0:
            return web.json_response({"detail": "overloaded"}, status=503)
        headers = {"Content-Type": "text/event-stream", "x-rayfleet-worker": "w0"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            for data in self._events(body, chat=request.path.endswith("chat/completions")):
                await response.write(b"data: " + data + b"\n\n")
                await asyncio.sleep(self.pace_s)
        finally:
            self.running -= 1
        await response.write_eof()
        return response

    def _events(self, body: dict[str, Any], *, chat: bool) -> Iterator[bytes]:
        if chat:
            yield _chunk({"delta": {"role": "assistant", "content": ""}})
        for place in range(body["max_tokens"]):
            text = "" if place == self.empty else 'a "b"\n'
            yield _chunk({"delta": {"content": text}} if chat else {"text": text})
        if self.fail_with == "event":
            yield b'{"error": {"message": "the worker died"}}'
        if self.fail_with in ("event", "cut"):
            return
        yield _chunk({"delta": {}, "finish_reason": "length"} if chat else {"text": ""})
        if self.with_usage:
            prompt = body["messages"][0]["content"].split() if chat else body["prompt"]
            usage = {
                "prompt_tokens": len(prompt),
                "completion_tokens": body["max_tokens"],
                "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            }
            yield json.dumps({"choices": [], "usage": usage}).encode()
        yield b"[DONE]"


def _chunk(choice: dict[str, Any]) -> bytes:
    return json.dumps({"choices": [{"index": 0, **choice}], "usage": None}).encode()


@contextmanager
def running_backend() -> Iterator[Backend]:
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
