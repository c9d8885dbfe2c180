"""How many workers each model should have, as Serve's controller has it, for gateways' metrics.

The number is decided in the controller, by a policy or by a Serve config, and Serve tells replicas
nothing of it: they ask, for what Serve's dashboard asks for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import ray
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

from router.metrics.stats import WorkerTarget

logger = logging.getLogger(__name__)

ASK_S = 5.0
"""Seconds between two questions: a third of deploy/monitoring's scrape interval. An answer costs
the controller some 4 ms."""


async def follow_targets(
    application: str,
    listeners: Mapping[str, Callable[[WorkerTarget], None]],
    ask: Callable[[], Awaitable[Mapping[str, Any]]] | None = None,
    every_s: float = ASK_S,
) -> None:
    """Tells of each deployment what Serve wants of it, until it is cancelled.

    While Serve cannot be asked, what it said last is taken to hold.

    Args:
        application: whose deployments they are.
        listeners: by deployment.
        ask: returns Serve's details, as its REST API has them; the controller's, if not given.
        every_s: seconds between two questions.
    """
    ask = ask or _serve_details
    while True:
        try:
            details = await ask()
            deployments = details["applications"][application]["deployments"]
            for deployment, listener in listeners.items():
                listener(target_of(deployments[deployment]))
        except Exception as error:
            logger.debug("Serve tells nothing of its targets: %s", error)
        await asyncio.sleep(every_s)


def target_of(details: Mapping[str, Any]) -> WorkerTarget:
    """The target of one deployment, from its details, with its bounds; where it has none they are
    its number."""
    wanted = int(details["target_num_replicas"])
    scaling = details["deployment_config"].get("autoscaling_config")
    if scaling is None:
        return WorkerTarget(wanted, wanted, wanted)
    return WorkerTarget(wanted, int(scaling["min_replicas"]), int(scaling["max_replicas"]))


async def _serve_details() -> Mapping[str, Any]:
    controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    details: Mapping[str, Any] = await controller.get_serve_instance_details.remote()
    return details
