"""Routers that simulations compare, and the settings grid of each."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

from deploy.benchmarks.routing.cache_aware import CacheAwareRouter
from deploy.benchmarks.routing.simulated import Clock, GatewayRouter, SimulatedRouter
from router.config import PolicyName, RoutingConfig
from worker.protocol.options import from_options

Settings = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A router that takes part in a comparison."""

    name: str
    create: Callable[[Settings, int, Clock], SimulatedRouter]
    """Creates the router from settings, a seed and the simulation's clock."""
    grid: tuple[Settings, ...] = ()
    """Settings to choose from; the best ones are found with another seed."""
    foreign: bool = False
    """Whether the router is another project's code."""


OWN = "adaptive"
"""rayfleet's policy, which is compared with the best of all other routers."""
ROUTERS = (*get_args(PolicyName), "ray-prefix", "dynamo")
"""Names of the routers that are compared by default."""

_FLEET_GRIDS: Mapping[str, tuple[Settings, ...]] = {
    "prefix-score": tuple(
        {"prefix_score_hit_weight": hit, "prefix_score_utilisation_weight": busy}
        for hit in (0.01, 0.03, 0.1, 0.3, 1.0)
        for busy in (100.0, 1000.0)
    ),
}
_RAY_GRID: tuple[Settings, ...] = tuple(
    {"imbalanced_threshold": threshold, "match_rate_threshold": rate}
    for threshold in (2, 5, 10, 20, 50)
    for rate in (0.1, 0.3)
)
_NEVER_S = 10**6
_DYNAMO_GRID: tuple[Settings, ...] = tuple(
    {"PREFILL_LOAD_SCALE": scale, **predicted}
    for scale in (0.5, 1.0, 2.0, 5.0, 10.0)
    for predicted in ({}, {"PREDICTED_TTL_SECS": _NEVER_S})
)
"""Settings of Dynamo. Predicted blocks expire by Dynamo's clock, not the simulation's, so their
lifetime is 0 or infinite."""


def find_routers(names: tuple[str, ...]) -> tuple[list[Entry], list[str]]:
    """Routers with the given names, and notes about routers that are not installed."""
    entries, notes = [], []
    for name in names:
        if name == "ray-prefix":
            if importlib.util.find_spec("ray") is None:
                notes.append("skipping ray-prefix: ray is not installed")
                continue
            entries.append(Entry(name=name, create=_ray, grid=_RAY_GRID, foreign=True))
        elif name == "dynamo":
            if importlib.util.find_spec("dynamo") is None:
                notes.append("skipping dynamo: pip install 'rayfleet[bench-peers]'")
                continue
            entries.append(Entry(name=name, create=_dynamo, grid=_DYNAMO_GRID, foreign=True))
        elif name == "sglang-cache-aware":
            entries.append(Entry(name=name, create=_cache_aware, foreign=True))
        else:
            create = partial(_fleet, name)
            entries.append(Entry(name=name, create=create, grid=_FLEET_GRIDS.get(name, ())))
    return entries, notes


def _fleet(policy: str, settings: Settings, seed: int, clock: Clock) -> SimulatedRouter:
    return GatewayRouter(from_options(RoutingConfig, {"routing_policy": policy, **settings}), clock)


def _ray(settings: Settings, seed: int, clock: Clock) -> SimulatedRouter:
    # Imported here: only this router needs Ray.
    from deploy.benchmarks.routing.ray_prefix import RayPrefixRouter

    return RayPrefixRouter(clock, seed, dict(settings))


def _cache_aware(settings: Settings, seed: int, clock: Clock) -> SimulatedRouter:
    return CacheAwareRouter(settings)


def _dynamo(settings: Settings, seed: int, clock: Clock) -> SimulatedRouter:
    # Otherwise Dynamo logs each decision; it reads this variable on import.
    os.environ.setdefault("DYN_LOG", "error")
    from deploy.benchmarks.routing.dynamo import DynamoRouter

    return DynamoRouter(clock, settings)
