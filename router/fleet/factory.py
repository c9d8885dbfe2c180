"""Routing policies by name."""

from __future__ import annotations

from router.fleet.base import RoutingPolicy
from router.fleet.prefix_score import PrefixScorePolicy


def create_policy(name: str = "prefix_score") -> RoutingPolicy:
    """The routing policy called `name`. Raises ValueError with the known names."""
    policies: dict[str, type[RoutingPolicy]] = {"prefix_score": PrefixScorePolicy}
    if name not in policies:
        raise ValueError(f"unknown routing policy {name}: choose one of {', '.join(policies)}")
    return policies[name]()
