"""A Serve application with two replicas behind rayfleet's request router, on an existing cluster.

Prints which replica answered each of several conversations, in two rounds; the second round
continues the prompts of the first. Ray is imported after its environment has been set.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from functools import cache
from typing import TYPE_CHECKING, Any

from cluster.local_ray import join_ray

if TYPE_CHECKING:
    from cluster.serve_router import FleetRouter

APPLICATION = "routed"
NUM_TALKS = 12
NEWS_S = 120.0
"""Timeout in seconds until the router knows that a request has ended, which may be after its
response has been received."""


def main(address: str) -> None:
    """Runs the application."""
    join_ray(address)
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    class Model:
        async def __call__(self, body: dict[str, str]) -> str:
            await asyncio.sleep(0.01)
            return str(serve.get_replica_context().replica_id.unique_id)

    deployment: Any = serve.deployment(
        num_replicas=2,
        request_router_config=RequestRouterConfig(
            request_router_class="cluster.serve_router.FleetRouter"
        ),
        max_ongoing_requests=100,
        ray_actor_options={"num_cpus": 0},
    )(Model)

    def send_request(talk: int, end: str) -> str:
        answer = handle.remote({"prompt": f"talk {talk}: " + "w " * 2000 + end}).result()
        wait_for_news()
        return str(answer)

    try:
        handle = serve.run(deployment.bind(), name=APPLICATION, route_prefix=None)
        rounds = [[send_request(talk, end) for talk in range(NUM_TALKS)] for end in ("", "more")]
    finally:
        serve.delete(APPLICATION)
    print(json.dumps(rounds))


@cache
def find_router() -> FleetRouter:
    """The router of this process, among all objects."""
    from cluster.serve_router import FleetRouter

    [router] = [thing for thing in gc.get_objects() if isinstance(thing, FleetRouter)]
    return router


def wait_for_news() -> None:
    """Waits until no request counts as running or in transit at any replica."""
    router = find_router()
    deadline = time.monotonic() + NEWS_S
    while router._placed or any(cache.running for cache in router._caches.values()):
        assert time.monotonic() < deadline, "the router does not know that the request has ended"
        time.sleep(0.005)


if __name__ == "__main__":
    main(sys.argv[1])
