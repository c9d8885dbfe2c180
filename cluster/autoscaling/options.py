"""Autoscaling options of a Serve deployment: number of replicas, or autoscaling policy."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from typing import Any

from ray.serve.config import AggregationFunction, AutoscalingPolicy
from ray.serve.config import AutoscalingConfig as ServeAutoscaling

from cluster.autoscaling.config import AutoscalingConfig

REPORT_S = 1.0
"""Interval between a gateway's load reports in seconds."""
_POLICIES = "cluster.autoscaling.policy"


def gateway_replicas(minimum: int, maximum: int, *, reporting: bool) -> dict[str, Any]:
    """Options for `minimum` to `maximum` gateways; with `reporting`, Serve collects their load
    reports even for a fixed number."""
    if minimum == maximum and not reporting:
        return {"num_replicas": minimum}
    return {"autoscaling_config": _autoscaling(minimum, maximum, "GatewayPolicy", {}, REPORT_S)}


def worker_replicas(count: int, config: AutoscalingConfig) -> dict[str, Any]:
    """Options for a model's workers: the autoscaling policy if enabled, otherwise the fixed number
    `count`."""
    if not config.enabled:
        return {"num_replicas": count}
    bounds = (config.min_workers, config.max_workers)
    return {"autoscaling_config": _autoscaling(*bounds, "WorkerPolicy", asdict(config), 10.0)}


def _autoscaling(
    minimum: int, maximum: int, policy: str, arguments: dict[str, Any], interval_s: float
) -> ServeAutoscaling:
    """Serve's autoscaling options for a policy, without Serve's delays: `Autoscaler` has its own.

    Args:
        minimum: minimum number of replicas.
        maximum: maximum number of replicas.
        policy: name of the class in `cluster.autoscaling.policy`.
        arguments: keyword arguments of the class.
        interval_s: interval between a replica's metric reports in seconds.
    """
    with warnings.catch_warnings():
        # Serve deprecates the interval in favor of an environment variable, but still uses it.
        warnings.simplefilter("ignore", DeprecationWarning)
        return ServeAutoscaling(
            min_replicas=minimum,
            max_replicas=maximum,
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            downscale_to_zero_delay_s=0.0,
            metrics_interval_s=interval_s,
            look_back_period_s=5.0 * interval_s,
            # HAZARD: with no replica, Serve starts one without calling the policy if the aggregate
            # of requests over the look-back period is above zero. The minimum is zero, unless a
            # request is queued for the whole period.
            aggregation_function=AggregationFunction.MIN,
            policy=AutoscalingPolicy(
                policy_function=f"{_POLICIES}:{policy}", policy_kwargs=arguments
            ),
        )
