"""Target number of workers of each model, read from Serve's controller for the gateways' metrics.

An autoscaling policy or a Serve config sets it in the controller, which does not send it to
replicas. Gateways ask for the details that Serve's dashboard shows.
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
"""Seconds between two queries of the controller: a third of deploy/monitoring's scrape interval.
Each takes the controller some 4 ms."""


async def follow_targets(
    application: str,
    listeners: Mapping[str, Callable[[WorkerTarget], None]],
    ask: Callable[[], Awaitable[Mapping[str, Any]]] | None = None,
    every_s: float = ASK_S,
) -> None:
    """Calls a listener per deployment with the deployment's target, repeatedly until cancelled.

    While the controller cannot be asked, no listener is called: they keep the last target.

    Args:
        application: name of the Serve application of the deployments.
        listeners: called with the target, by name of the deployment.
        ask: returns the details of Serve, as its REST API has them; from the controller by default.
        every_s: seconds between two queries.
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
    """The target of one deployment and its autoscaling bounds, from Serve's details of it. Without
    autoscaling both bounds equal the target."""
    wanted = int(details["target_num_replicas"])
    scaling = details["deployment_config"].get("autoscaling_config")
    if scaling is None:
        return WorkerTarget(wanted, wanted, wanted)
    return WorkerTarget(wanted, int(scaling["min_replicas"]), int(scaling["max_replicas"]))


async def _serve_details() -> Mapping[str, Any]:
    controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    details: Mapping[str, Any] = await controller.get_serve_instance_details.remote()
    return details
