"""The paced workers as a plain Ray Serve application: an ingress, and replicas behind its handle.

Annotations are evaluated here: FastAPI reads those of the routes in the replica, where the pickled
class has lost the module in which their names would be looked up.
"""

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from cluster.bench.routing.paced import PacedServer
from cluster.bench.routing.real.options import RealOptions

PREFIX_ROUTER = (
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router:"
    "PrefixCacheAffinityRouter"
)
_MANY = 10**6
"""Ray Serve LLM sets no bound to a replica's requests either."""


class PacedReplica:
    """One worker."""

    async def __init__(self, model: str, options: RealOptions) -> None:  # type: ignore[misc]
        """Serve awaits it, on the loop that the worker's steps wait in."""
        self._server = PacedServer(model, options.shape, options.pace)

    async def generate(self, call: SimpleNamespace) -> AsyncIterator[bytes]:
        """One completion's events. Prefix routers look for the attribute `prompt`."""
        async for event in self._server.generate(call.prompt, call.max_tokens):
            yield event


def build(model: str, options: RealOptions, *, by_prefix: bool) -> serve.Application:
    """The application, with Ray's own choice of replica or Ray Serve LLM's prefix router."""
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
