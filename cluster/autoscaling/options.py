"""The autoscaling options of a Serve deployment: the number of its replicas, or its policy."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from typing import Any

from ray.serve.config import AggregationFunction, AutoscalingPolicy
from ray.serve.config import AutoscalingConfig as ServeAutoscaling

from cluster.autoscaling.config import AutoscalingConfig

REPORT_S = 1.0
"""Seconds between two reports of a gateway."""
_POLICIES = "cluster.autoscaling.policy"


def gateway_replicas(count: int, *, reporting: bool) -> dict[str, Any]:
    """Options for so many gateways; `reporting` has them tell the controller of their load."""
    if not reporting:
        return {"num_replicas": count}
    return {"autoscaling_config": _autoscaling(count, count, "GatewayPolicy", {}, REPORT_S)}


def worker_replicas(count: int, config: AutoscalingConfig) -> dict[str, Any]:
    """Options for a model's workers: `count` of them where no autoscaling is asked for."""
    if not config.enabled:
        return {"num_replicas": count}
    bounds = (config.min_workers, config.max_workers)
    return {"autoscaling_config": _autoscaling(*bounds, "WorkerPolicy", asdict(config), 10.0)}


def _autoscaling(
    least: int, most: int, policy: str, arguments: dict[str, Any], interval_s: float
) -> ServeAutoscaling:
    """Serve's own delays are zero: the decision has its own."""
    with warnings.catch_warnings():
        # Serve wants the interval in the environment some day, but reads this one.
        warnings.simplefilter("ignore", DeprecationWarning)
        return ServeAutoscaling(
            min_replicas=least,
            max_replicas=most,
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            downscale_to_zero_delay_s=0.0,
            metrics_interval_s=interval_s,
            look_back_period_s=5.0 * interval_s,
            # HAZARD: before it asks a policy, Serve starts a replica where there is none and any
            # request was counted in that period. The least in it is none: those were answered.
            aggregation_function=AggregationFunction.MIN,
            policy=AutoscalingPolicy(
                policy_function=f"{_POLICIES}:{policy}", policy_kwargs=arguments
            ),
        )
