"""Ray Serve's policies: one that listens to the gateways, and one per model that decides.

They run in Serve's controller, which has to be able to import rayfleet. Serve pickles this module
by value, and with it each object that it has imported by name: the registries are reached through
their module, which is pickled as a name.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from cluster.autoscaling import registry
from cluster.autoscaling.config import AutoscalingConfig
from cluster.autoscaling.decision import Autoscaler

Decision = tuple[int, dict[str, Any]]
"""Replicas, and state that Serve would keep."""


class GatewayPolicy:
    """Leaves the number of gateways as it is, and takes down what they tell of their models."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock

    def __call__(self, context: Any) -> Decision:
        """Called by Serve at each turn of its control loop (`RAY_SERVE_CONTROL_LOOP_INTERVAL_S`),
        with its AutoscalingContext."""
        registry.REGISTRIES[context.app_name].take(context.raw_metrics or {}, self._clock())
        return context.target_num_replicas, {}


class WorkerPolicy:
    """Decides for one model.

    Args:
        clock: seconds from some fixed moment.
        config: fields of AutoscalingConfig.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, **config: Any) -> None:
        self._autoscaler = Autoscaler(AutoscalingConfig(**config))
        self._clock = clock

    def __call__(self, context: Any) -> Decision:
        """Called by Serve at each turn of its control loop (`RAY_SERVE_CONTROL_LOOP_INTERVAL_S`),
        with its AutoscalingContext."""
        now, target = self._clock(), context.target_num_replicas
        running = context.current_num_replicas
        load = registry.REGISTRIES[context.app_name].load(context.deployment_name, now)
        if load is None:
            self._autoscaler.observe(target, running, now)
            return target, {}
        decided = self._autoscaler.decide(load, target, now, running)
        if decided != target:
            # Where Serve's controller logs what it does.
            logging.getLogger("ray.serve").info(
                "%s: %d workers in place of %d, of which %d run; starts take %.0f s; %s",
                context.deployment_name,
                decided,
                target,
                running,
                self._autoscaler.start_s,
                load,
            )
        return decided, {}
