"""Workload of a simulation: requests, workers, and incidents of workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from worker.protocol.blocks import TOKEN_BYTES
from worker.protocol.step_time import StepCosts

DEFAULT_COSTS = StepCosts(
    constant=0.012,
    prefill_token=1.5e-4,
    attended=2e-9,
    decode_row=5e-5,
    context_token=5e-9,
)
"""Approximate step costs of a model with 70 billion weights on a group of data-center GPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """One request."""

    request_id: str
    at: float
    """Seconds from the start, or from the end of `after` if that is given."""
    tokens: bytes
    """Token ids of the prompt, little-endian int32."""
    output_len: int
    """Tokens to generate."""
    session: str = ""
    """Id of the request's conversation; empty for none."""
    after: str = ""
    """ID of a request that must finish first; empty for none."""
    adapter: str = ""
    """Name of the request's LoRA adapter; empty for none."""
    measured: bool = True
    """Whether figures include the request; warm-up requests are not measured."""

    @property
    def num_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.tokens) // TOKEN_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetShape:
    """Number, limits and speeds of simulated workers."""

    slowness: tuple[float, ...] = (1.0,) * 8
    """Factor for the step times of each worker."""
    costs: StepCosts = DEFAULT_COSTS
    """Step costs of a worker of slowness 1."""
    page_size: int = 16
    """Tokens per page."""
    num_pages: int = 6000
    """Pages of each worker's KV cache."""
    max_num_seqs: int = 64
    """Maximum number of running requests per worker."""
    max_num_batched_tokens: int = 2048
    """Token budget of a step."""
    default_tpot_ms: int = 100
    """Target time per output token in milliseconds, which limits prompts in steps with decodes."""
    num_host_pages: int = 0
    """Pages of each worker's host-memory tier."""
    max_loras: int = 0
    """Slots for LoRA adapters on each worker; 0 disables them."""
    max_cpu_loras: int = 0
    """LoRA adapters in each worker's host memory."""
    adapter_read_s: float = 0.4
    """Seconds to read a LoRA adapter to host memory: 200 MB from a network disk."""

    @property
    def pooled_pages(self) -> int:
        """Pages of all workers together."""
        return self.num_pages * len(self.slowness)


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """Incident of a worker."""

    at: float
    """Seconds from the start."""
    kind: Literal["kill", "join", "leave", "break"]
    """kill: its ranks exit and restart with an empty cache; join: it starts; leave: it drains
    and ends; break: its attach stream breaks, and is opened again."""
    worker: int
    """Number of the worker; those beyond the fleet's shape start by joining."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Requests, fleet and incidents of one simulation."""

    name: str
    arrivals: tuple[Arrival, ...]
    fleet: FleetShape
    incidents: tuple[Incident, ...] = ()
