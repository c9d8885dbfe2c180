"""Autoscaling policies for Ray Serve: one for gateways, which collects load reports, and one per
model.

They run in Serve's controller, where rayfleet must be importable. Serve pickles this module by
value, including objects imported from other modules. Therefore it imports the modules `gateways`
and `registry`, which are pickled by reference, and not REGISTRIES itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from cluster.autoscaling import gateways, registry
from cluster.autoscaling.config import AutoscalingConfig
from cluster.autoscaling.decision import Autoscaler

Decision = tuple[int, dict[str, Any]]
"""Target number of replicas, and state that Serve stores for the policy (unused)."""


class GatewayPolicy:
    """Policy of the gateways: adds their load reports to the registry, and decides their number.

    Serve limits the number to its bounds, which are equal for a fixed number of gateways.

    Args:
        clock: monotonic clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._scaler = gateways.GatewayScaler()

    def __call__(self, context: Any) -> Decision:
        """Records the load reports, and returns the target number of gateways. Serve calls this in
        each iteration of its control loop (`RAY_SERVE_CONTROL_LOOP_INTERVAL_S`), with its
        AutoscalingContext."""
        now, target = self._clock(), context.target_num_replicas
        reports = registry.REGISTRIES[context.app_name]
        reports.replace(context.raw_metrics or {}, now)
        num_processors = reports.total(gateways.CPU, now)
        if num_processors is None:
            return target, {}
        return self._scaler.decide(num_processors, target, now), {}


class WorkerPolicy:
    """Policy of one model's workers: calls `Autoscaler` with the load from the registry.

    Args:
        clock: monotonic clock in seconds.
        config: fields of AutoscalingConfig.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, **config: Any) -> None:
        self._autoscaler = Autoscaler(AutoscalingConfig(**config))
        self._clock = clock

    def __call__(self, context: Any) -> Decision:
        """Returns the target number of the model's workers. Serve calls this in each iteration of
        its control loop (`RAY_SERVE_CONTROL_LOOP_INTERVAL_S`), with its AutoscalingContext."""
        now, target = self._clock(), context.target_num_replicas
        running = context.current_num_replicas
        load = registry.REGISTRIES[context.app_name].load(context.deployment_name, now)
        if load is None:
            self._autoscaler.observe(target, running, now)
            return target, {}
        decided = self._autoscaler.decide(load, target, now, running)
        if decided != target:
            # The logger of Serve's controller.
            logging.getLogger("ray.serve").info(
                "%s: scaling from %d workers (%d running) to %d; startup time %.0f s; %s",
                context.deployment_name,
                target,
                running,
                decided,
                self._autoscaler.start_s,
                load,
            )
        return decided, {}
