"""Target number of workers of each model, read from Serve's controller for the gateways' metrics.

The target is set in the controller, by the autoscaling policy or a Serve config, and is not sent to
replicas. Gateways query the details shown by Serve's dashboard.
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

POLL_S = 5.0
"""Interval in seconds between controller queries: a third of deploy/monitoring's scrape interval.
Each query takes the controller about 4 ms."""


async def follow_targets(
    application: str,
    listeners: Mapping[str, Callable[[WorkerTarget], None]],
    query: Callable[[], Awaitable[Mapping[str, Any]]] | None = None,
    every_s: float = POLL_S,
) -> None:
    """Calls a listener per deployment with the deployment's target, repeatedly until cancelled.

    While the controller is unavailable, no listener is called, so all keep the last target.

    Args:
        application: name of the Serve application of the deployments.
        listeners: functions that are called with the target, keyed by name of the deployment.
        query: returns Serve's details, as in its REST API; by default from the controller.
        every_s: interval between queries in seconds.
    """
    query = query or _serve_details
    while True:
        try:
            details = await query()
            deployments = details["applications"][application]["deployments"]
            for deployment, listener in listeners.items():
                listener(target_of(deployments[deployment]))
        except Exception as error:
            logger.debug("cannot read worker targets from the Serve controller: %s", error)
        await asyncio.sleep(every_s)


def target_of(details: Mapping[str, Any]) -> WorkerTarget:
    """Target and autoscaling bounds of a deployment, from Serve's details of it. Without
    autoscaling, both bounds equal the target."""
    target = int(details["target_num_replicas"])
    scaling = details["deployment_config"].get("autoscaling_config")
    if scaling is None:
        return WorkerTarget(target, target, target)
    return WorkerTarget(target, int(scaling["min_replicas"]), int(scaling["max_replicas"]))


async def _serve_details() -> Mapping[str, Any]:
    controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    details: Mapping[str, Any] = await controller.get_serve_instance_details.remote()
    return details
