"""The traffic of a simulated fleet, and what becomes of its workers meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from worker.wire.blocks import TOKEN_BYTES
from worker.wire.step_time import StepCosts

DEFAULT_COSTS = StepCosts(
    constant=0.012,
    prefill_token=1.5e-4,
    attended=2e-9,
    decode_row=5e-5,
    context_token=5e-9,
)
"""Costs of a model of 70 billion weights on a group of data-centre GPUs, about."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """One request."""

    request_id: str
    at: float
    """Seconds from the start; after the end of `after`, where that is given."""
    tokens: bytes
    """Token ids of the prompt, little-endian int32."""
    output_len: int
    """Tokens to generate."""
    session: str = ""
    """The conversation it belongs to."""
    after: str = ""
    """Request whose end it waits for."""
    measured: bool = True
    """Whether its times count; warming up does not."""

    @property
    def num_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.tokens) // TOKEN_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetShape:
    """The simulated workers."""

    slowness: tuple[float, ...] = (1.0,) * 8
    """Times of each worker over those of `costs`."""
    costs: StepCosts = DEFAULT_COSTS
    """How long a step takes on a worker of slowness 1."""
    page_size: int = 16
    """Tokens per page."""
    num_pages: int = 6000
    """Pages of a worker's cache."""
    max_num_seqs: int = 64
    """Requests that run at once on a worker."""
    max_num_batched_tokens: int = 2048
    """Tokens per step."""

    @property
    def pooled_pages(self) -> int:
        """Pages of all workers' caches together."""
        return self.num_pages * len(self.slowness)


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """Something that happens to a worker."""

    at: float
    kind: Literal["kill", "join", "leave", "break"]
    """Its ranks die and come back empty after a while; it comes up; it drains and goes; the stream
    of its events breaks, and it is attached anew."""
    worker: int
    """Its number; those beyond the fleet's shape come up by joining."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Requests, fleet and incidents of one simulation."""

    name: str
    arrivals: tuple[Arrival, ...]
    fleet: FleetShape
    incidents: tuple[Incident, ...] = ()
