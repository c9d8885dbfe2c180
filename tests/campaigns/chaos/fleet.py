"""The fleet under test: its configuration, and whether it is complete."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cluster.config import EndpointConfig, FleetConfig, ModelSpec, ServeConfig, find_demo_model
from cluster.directories import DIRECTORY_VARIABLE
from cluster.ports import free_ports
from tests.campaigns.chaos.haproxy import gateways_up
from tests.campaigns.chaos.kinds import Part
from tests.campaigns.chaos.options import ChaosOptions
from tests.campaigns.chaos.planned_requests import DIFFUSION, MODEL
from tests.campaigns.chaos.processes import Process, count, find
from tests.campaigns.chaos.scrape import ScrapedMetrics, scrape
from worker.config import EngineConfig

KV_CACHE_TOKENS: Final = 32768
"""KV cache size per worker in tokens."""
_POLL_S = 0.4
_AT_LEAST = (Part.HAPROXY, Part.GUARD)
"""Parts whose replaced processes may stay alive, either for their streams or for the HAProxy that
others adopted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedFleet:
    """Processes and workers of a complete fleet."""

    parts: Counter[Part]
    """Number of processes by part."""
    ready: dict[str, int]
    """Number of ready workers by model."""
    num_gateways: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """State of a fleet at one point in time."""

    parts: Counter[Part] = field(default_factory=Counter)
    metrics: ScrapedMetrics | None = None
    gateways_up: int | None = None
    """Number of gateways that are up according to HAProxy; None without HAProxy."""


def serve_config(options: ChaosOptions) -> ServeConfig:
    """Configuration of the fleet; batch-invariant, so that answers can be compared bitwise."""
    common = {
        "device": "cpu",
        "tensor_parallel_size": options.tensor_parallel_size,
        "batch_invariant": True,
        "kv_cache_tokens": KV_CACHE_TOKENS,
        "max_num_seqs": 32,
        "step_timeout_s": options.step_timeout_s,
    }
    drafting = {"speculative_method": "draft", "speculative_model": options.draft_model}
    engine = EngineConfig.of(
        model=options.model or find_demo_model(),
        **common,
        **(drafting if options.draft_model else {}),
    )
    engines = {MODEL: engine}
    if options.diffusion_model:
        engines[DIFFUSION] = EngineConfig.of(model=options.diffusion_model, **common)
    models = tuple(
        ModelSpec(
            fleet=FleetConfig(served_model_name=name, num_workers=options.num_workers),
            engine=engine,
        )
        for name, engine in engines.items()
    )
    endpoint = EndpointConfig(port=free_ports(1)[0], num_gateways=options.num_gateways)
    return ServeConfig(endpoint=endpoint, models=models)


class FleetWatch:
    """Observes a running fleet.

    Args:
        base_url: URL of the endpoint.
        config: configuration of the fleet.
    """

    def __init__(self, base_url: str, config: ServeConfig) -> None:
        self.base_url = base_url
        self.port = config.endpoint.port
        self.directory = Path(os.environ[DIRECTORY_VARIABLE])
        self.resubmissions: dict[tuple[str, str], float] = {}
        """Last reported number, keyed by (model, gateway); includes gateways that have been killed
        since."""
        self.expected = ExpectedFleet(
            parts=count(self.processes()),
            ready={model.name: model.max_workers for model in config.models},
            num_gateways=config.endpoint.num_gateways,
        )

    def processes(self) -> list[Process]:
        """All processes that faults may hit."""
        return find(self.directory)

    def look(self) -> Look:
        """Current state of the fleet."""
        metrics = scrape(self.base_url)
        if metrics is not None:
            self.resubmissions.update(metrics.resubmissions)
        has_haproxy = Part.HAPROXY in self.expected.parts
        return Look(
            parts=count(self.processes()),
            metrics=metrics,
            gateways_up=gateways_up(self.directory) if has_haproxy else None,
        )

    def wait_whole(
        self, timeout_s: float, on_look: Callable[[Look], None] = lambda look: None
    ) -> str | None:
        """Waits until the fleet is complete in two consecutive checks; returns what is missing on
        timeout. Two checks are required because a process that is about to exit still exists."""
        deadline, num_whole = time.monotonic() + timeout_s, 0
        while True:
            look = self.look()
            on_look(look)
            problem = missing(self.expected, look)
            num_whole = 0 if problem else num_whole + 1
            if num_whole == 2:
                return None
            if time.monotonic() > deadline:
                return problem or "not complete in two consecutive checks"
            time.sleep(_POLL_S)


def missing(expected: ExpectedFleet, look: Look) -> str | None:
    """Description of what is missing in a fleet; None if it is complete."""
    for part, number in expected.parts.items():
        if part is Part.COMPILER:
            continue
        found = look.parts[part]
        if found < number or (found > number and part not in _AT_LEAST):
            return f"{found} of {number} {part.value} processes"
    if look.metrics is None:
        return "the endpoint does not respond"
    for model, number in expected.ready.items():
        ready = {gateway: n for (name, gateway), n in look.metrics.ready.items() if name == model}
        if len(ready) != expected.num_gateways:
            return f"{len(ready)} of {expected.num_gateways} gateways report {model}"
        if any(n != number for n in ready.values()):
            return f"gateways see {sorted(ready.values())} workers of {model}, not {number}"
    if look.gateways_up is not None and look.gateways_up != expected.num_gateways:
        return f"HAProxy sends requests to {look.gateways_up} of {expected.num_gateways} gateways"
    return None
