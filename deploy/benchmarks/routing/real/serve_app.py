"""Paced workers as a plain Ray Serve application: an ingress, and replicas that it calls.

This module does not use `from __future__ import annotations`: FastAPI reads the annotations of
routes in the replica, where the pickled class has no module in which to look up names.
"""

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from deploy.benchmarks.routing.paced import PacedServer
from deploy.benchmarks.routing.real.options import RealOptions

PREFIX_ROUTER = (
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router:"
    "PrefixCacheAffinityRouter"
)
_MANY = 10**6
"""Maximum number of ongoing requests per replica; Ray Serve LLM sets no lower limit."""


class PacedReplica:
    """Replica with one paced worker."""

    async def __init__(self, model: str, options: RealOptions) -> None:  # type: ignore[misc]
        """Creates the worker in the replica's event loop; Serve awaits the constructor."""
        self._server = PacedServer(model, options.shape, options.pace)

    async def generate(self, call: SimpleNamespace) -> AsyncIterator[bytes]:
        """Yields the events of one completion. Ray's prefix router reads the call's attribute
        `prompt`."""
        async for event in self._server.generate(call.prompt, call.max_tokens):
            yield event


def build(model: str, options: RealOptions, *, by_prefix: bool) -> serve.Application:
    """Application with Ray Serve LLM's prefix router or Ray Serve's default router."""
    app = FastAPI()

    class Ingress:
        def __init__(self, worker: DeploymentHandle[Any]) -> None:
            self._generate: Any = worker.options(stream=True).generate

        @app.post("/v1/completions")
        async def complete(self, request: Request) -> StreamingResponse:
            body = await request.json()
            call = SimpleNamespace(prompt=body["prompt"], max_tokens=body["max_tokens"])
            return StreamingResponse(self._generate.remote(call), media_type="text/event-stream")

    many: Any = serve.deployment(max_ongoing_requests=_MANY, ray_actor_options={"num_cpus": 0})
    router = {"request_router_class": PREFIX_ROUTER} if by_prefix else {}
    worker = many(PacedReplica).options(
        name="Worker",
        num_replicas=options.num_workers,
        request_router_config=RequestRouterConfig(**router),
    )
    ingress = many(serve.ingress(app)(Ingress)).options(name="Ingress")
    application: serve.Application = ingress.bind(worker.bind(model, options))
    return application
