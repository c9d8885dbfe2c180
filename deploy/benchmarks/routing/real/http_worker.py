"""Process with one paced worker behind an OpenAI-compatible endpoint, for HTTP routers.

python -m deploy.benchmarks.routing.real.http_worker JSON
"""

from __future__ import annotations

import logging
import sys

import msgspec
import uvloop
from aiohttp import web

from deploy.benchmarks.routing.paced import PacedServer
from deploy.benchmarks.routing.real.options import RealOptions

_PROMPT_BYTES = 16 << 20


class HttpWorker(msgspec.Struct, frozen=True):
    """Options of a worker process, passed as a JSON argument."""

    port: int
    model: str
    """Folder with a tokenizer."""
    num_workers: int
    pace: float
    """Factor for the step times (see `RealOptions`)."""


def main(argument: str) -> None:
    """Serves on the loopback interface until the process is terminated."""
    settings = msgspec.json.decode(argument, type=HttpWorker)
    # sglang-router first probes for gRPC, which aiohttp would log as an error.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    web.run_app(
        _application(settings),
        host="127.0.0.1",
        port=settings.port,
        print=None,
        loop=uvloop.new_event_loop(),
    )


async def _application(settings: HttpWorker) -> web.Application:
    shape = RealOptions(num_workers=settings.num_workers, pace=settings.pace).shape
    server = PacedServer(settings.model, shape, settings.pace)

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async for event in server.generate(body["prompt"], body["max_tokens"]):
            await response.write(event)
        await response.write_eof()
        return response

    async def healthy(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "paced", "object": "model"}]})

    async def about(request: web.Request) -> web.Response:
        about = {"model_path": "paced", "served_model_name": "paced", "is_generation": True}
        return web.json_response(about)

    application = web.Application(client_max_size=_PROMPT_BYTES)
    application.router.add_post("/v1/completions", complete)
    application.router.add_get("/v1/models", models)
    for path in ("/health", "/health_generate"):
        application.router.add_get(path, healthy)
    for path in ("/get_model_info", "/model_info", "/get_server_info", "/server_info"):
        application.router.add_get(path, about)
    return application


if __name__ == "__main__":
    main(sys.argv[1])
