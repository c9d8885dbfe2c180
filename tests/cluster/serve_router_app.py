"""A Serve application of two replicas behind our request router, in a process of its own.

Prints which replica answered each of some talks, in two rounds of which the second goes on with the
prompts of the first. Ray is imported once its environment is set.
"""

from __future__ import annotations

import asyncio
import json

from cluster.local_ray import local_ray

NUM_TALKS = 12


def main() -> None:
    """Runs it."""
    with local_ray(num_cpus=2):
        from ray import serve
        from ray.serve.config import RequestRouterConfig

        @serve.deployment(
            num_replicas=2,
            request_router_config=RequestRouterConfig(
                request_router_class="cluster.serve_router.FleetRouter"
            ),
            max_ongoing_requests=100,
            ray_actor_options={"num_cpus": 0.1},
        )
        class Model:
            async def __call__(self, body: dict[str, str]) -> str:
                await asyncio.sleep(0.01)
                return str(serve.get_replica_context().replica_id.unique_id)

        serve.start(proxy_location="Disabled")
        try:
            handle = serve.run(Model.bind(), route_prefix=None)
            rounds = [
                [
                    handle.remote({"prompt": f"talk {talk}: " + "w " * 2000 + end}).result()
                    for talk in range(NUM_TALKS)
                ]
                for end in ("", "more")
            ]
        finally:
            serve.shutdown()
    print(json.dumps(rounds))


if __name__ == "__main__":
    main()
