"""Workload of a simulation: requests, workers and worker incidents."""

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
"""Approximate step costs of a 70B model on a group of data-center GPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """One request."""

    request_id: str
    at: float
    """Seconds from the start, or from the end of `after` if set."""
    tokens: bytes
    """Token ids of the prompt, little-endian int32."""
    output_len: int
    """Number of tokens to generate."""
    session: str = ""
    """ID of the request's conversation; empty if there is none."""
    after: str = ""
    """ID of a request that must finish first; empty if there is none."""
    adapter: str = ""
    """Name of the request's LoRA adapter; empty if there is none."""
    measured: bool = True
    """Whether metrics include this request; false for warm-up requests."""

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self.tokens) // TOKEN_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetShape:
    """Number, limits and speeds of simulated workers."""

    slowness: tuple[float, ...] = (1.0,) * 8
    """Factor for each worker's step times."""
    costs: StepCosts = DEFAULT_COSTS
    """Step costs of a worker with slowness 1."""
    page_size: int = 16
    """Tokens per page."""
    num_pages: int = 6000
    """Number of KV cache pages per worker."""
    max_num_seqs: int = 64
    """Maximum number of running requests per worker."""
    max_num_batched_tokens: int = 2048
    """Token budget per step."""
    default_tpot_ms: int = 100
    """Target time per output token in milliseconds; limits prefill in steps with decodes."""
    num_host_pages: int = 0
    """Number of pages in each worker's host-memory tier."""
    max_loras: int = 0
    """Number of LoRA adapter slots per worker; 0 disables adapters."""
    max_cpu_loras: int = 0
    """Number of LoRA adapters in each worker's host memory."""
    adapter_read_s: float = 0.4
    """Seconds to read a LoRA adapter into host memory: 200 MB from a network disk."""

    @property
    def pooled_pages(self) -> int:
        """Total number of pages over all workers."""
        return self.num_pages * len(self.slowness)


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """Worker incident."""

    at: float
    """Seconds from the start."""
    kind: Literal["kill", "join", "leave", "break"]
    """kill: the ranks exit and restart with an empty cache; join: the worker starts; leave: it
    drains and exits; break: its attach stream breaks and is reopened."""
    worker: int
    """Index of the worker; workers that the fleet's shape does not include start when they join."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Requests, fleet and incidents of one simulation."""

    name: str
    arrivals: tuple[Arrival, ...]
    fleet: FleetShape
    incidents: tuple[Incident, ...] = ()
