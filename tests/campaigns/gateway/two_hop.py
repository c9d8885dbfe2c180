"""Baseline that streams tokens through Ray Serve the usual way: ingress, handle, generator.

Each token is one item of the handle's response; nothing is tokenized, scheduled or detokenized.
Annotations are evaluated on import: FastAPI reads those of the routes in the replica, where the
pickled class no longer has a module in which to look up names.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from ray import serve
from ray.serve.handle import DeploymentHandle

_MANY = 10_000


class Generator:
    """Yields one word per `step_s`."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    async def generate(self, num_tokens: int) -> AsyncIterator[str]:
        """Yields `num_tokens` words at a constant rate."""
        start = time.perf_counter()
        for number in range(1, num_tokens + 1):
            await asyncio.sleep(start + number * self._step_s - time.perf_counter())
            yield " word"


class Ingress:
    """Converts each item of the generator to one server-sent event."""

    def __init__(self, generator: DeploymentHandle[Any]) -> None:
        self._generate: Any = generator.options(stream=True).generate

    async def events(self, body: dict[str, Any]) -> AsyncIterator[str]:
        """Yields the events of one completion in OpenAI's format."""
        count = 0
        async for text in self._generate.remote(body["max_tokens"]):
            count += 1
            yield _event({"choices": [{"index": 0, "text": text, "finish_reason": None}]})
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
        yield _event({"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"


def build(step_s: float) -> serve.Application:
    """The application; `POST /v1/completions` streams `max_tokens` words."""
    app = FastAPI()

    class HttpIngress(Ingress):
        @app.post("/v1/completions")
        async def complete(self, request: Request) -> StreamingResponse:
            body = await request.json()
            return StreamingResponse(self.events(body), media_type="text/event-stream")

        @app.get("/v1/models")
        async def models(self) -> dict[str, Any]:
            return {"object": "list", "data": [{"id": "two-hop", "object": "model"}]}

    many: Any = serve.deployment(max_ongoing_requests=_MANY)
    generator = many(Generator).options(name="Generator").bind(step_s)
    ingress = many(serve.ingress(app)(HttpIngress)).options(name="Ingress")
    application: serve.Application = ingress.bind(generator)
    return application


def _event(payload: dict[str, Any]) -> str:
    return f"data: {json.dumps({'id': 'cmpl-0', 'object': 'text_completion', **payload})}\n\n"
