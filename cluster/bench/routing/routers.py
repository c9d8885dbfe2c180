"""Which routers a benchmark compares, and the settings that each is tried with."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

from cluster.bench.routing.simulated import Clock, GatewayRouter, SimulatedRouter
from router.config import PolicyName, RoutingConfig

Settings = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One router."""

    name: str
    create: Callable[[Settings, int, Clock], SimulatedRouter]
    """Makes the router from settings, a seed and the simulation's clock."""
    grid: tuple[Settings, ...] = ()
    """Settings among which the best is looked for, on data of other seeds."""
    foreign: bool = False
    """Whether its decisions are made by the code of another project."""


OWN = "adaptive"
"""The policy whose figures are reported."""
ROUTERS = (*get_args(PolicyName), "ray-prefix", "dynamo")

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
"""Its clock is not the simulation's, so what it predicts is let expire at once or never."""


def find_routers(names: tuple[str, ...]) -> tuple[list[Entry], list[str]]:
    """The routers by name, and what is to be said about those that cannot take part."""
    entries, notes = [], []
    for name in names:
        if name == "ray-prefix":
            if importlib.util.find_spec("ray") is None:
                notes.append("ray-prefix is left out: ray is not installed")
                continue
            entries.append(Entry(name=name, create=_ray, grid=_RAY_GRID, foreign=True))
        elif name == "dynamo":
            if importlib.util.find_spec("dynamo") is None:
                notes.append("dynamo is left out: pip install 'rayfleet[bench-peers]'")
                continue
            entries.append(Entry(name=name, create=_dynamo, grid=_DYNAMO_GRID, foreign=True))
        else:
            create = partial(_fleet, name)
            entries.append(Entry(name=name, create=create, grid=_FLEET_GRIDS.get(name, ())))
    return entries, notes


def _fleet(policy: str, settings: Settings, seed: int, clock: Clock) -> SimulatedRouter:
    return GatewayRouter(RoutingConfig(routing_policy=policy, **settings), clock)  # type: ignore[arg-type]


def _ray(settings: Settings, seed: int, clock: Clock) -> SimulatedRouter:
    # Imported here: only this router needs Ray.
    from cluster.bench.routing.ray_prefix import RayPrefixRouter

    return RayPrefixRouter(clock, seed, dict(settings))


def _dynamo(settings: Settings, seed: int, clock: Clock) -> SimulatedRouter:
    # It logs every decision, and looks at this when it is imported.
    os.environ.setdefault("DYN_LOG", "error")
    from cluster.bench.routing.dynamo import DynamoRouter

    return DynamoRouter(clock, settings)
