"""Routing policies by name."""

from __future__ import annotations

from collections.abc import Callable

from router.config import RoutingConfig
from router.fleet.adaptive import AdaptivePolicy
from router.fleet.base import RoutingPolicy
from router.fleet.least_load import LeastLoadPolicy
from router.fleet.power_of_two import PowerOfTwoPolicy
from router.fleet.prefix_score import PrefixScorePolicy
from router.fleet.round_robin import RoundRobinPolicy
from router.fleet.session import SessionPolicy
from router.fleet.utilisation import Utilisation


def create_policy(config: RoutingConfig, utilisation: Utilisation) -> RoutingPolicy:
    """The routing policy that `config` names. Raises ValueError with the known names."""
    policies: dict[str, Callable[[], RoutingPolicy]] = {
        "adaptive": lambda: AdaptivePolicy(utilisation),
        "prefix-score": lambda: PrefixScorePolicy(config),
        "least-load": LeastLoadPolicy,
        "power-of-two": PowerOfTwoPolicy,
        "round-robin": RoundRobinPolicy,
        "session": SessionPolicy,
    }
    if config.routing_policy not in policies:
        raise ValueError(
            f"unknown routing policy {config.routing_policy}: choose one of {', '.join(policies)}"
        )
    return policies[config.routing_policy]()
