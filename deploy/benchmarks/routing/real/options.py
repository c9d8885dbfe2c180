"""Options of `router --real`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from deploy.benchmarks.routing.workload import DEFAULT_COSTS, FleetShape

OWN = "rayfleet"
PEERS = ("sglang-router", "ray-prefix", "ray-serve")
Variant = Literal["rayfleet", "sglang-router", "ray-prefix", "ray-serve"]
WORKLOADS = ("shared-prompts", "multi-turn", "sibling-burst", "hot-prefix")


@dataclass(frozen=True, kw_only=True, slots=True)
class RealOptions:
    """Options of routers, paced workers and workloads."""

    peers: tuple[str, ...] = field(default=(), metadata={"flag": "--peer"})
    """Router to compare with: sglang-router (cache_aware), ray-prefix (Ray Serve LLM's
    PrefixCacheAffinityRouter) or ray-serve (Ray Serve's default). Can be repeated. Default: all."""
    sglang_router: str = "sglang-router"
    """Command that starts sglang-router. Install it in a separate environment."""
    model: str = ""
    """Folder with a tokenizer; default: the demo model."""
    num_workers: int = 4
    """Number of paced workers per router."""
    pace: float = 2.0
    """Factor for the simulation's step times and for the times between requests. At 1, a worker
    computes about 6,600 prompt tokens per second."""
    rounds: int = 3
    """Number of runs per router, each with new processes."""
    workloads: tuple[str, ...] = ()
    """Workloads, named as in the simulation: shared-prompts, multi-turn, sibling-burst, hot-prefix.
    """
    scale: float = 1.0
    """Factor for the number of requests; published results use 1."""
    first_seed: int = 1
    """Seed of the first round."""
    plot: str = ""
    """PNG file for hit rates and times to first token; default: no plot."""
    variant: str = ""
    """Measure only this router (rayfleet or a peer), once, and include all requests in the
    result."""

    def __post_init__(self) -> None:
        if unknown := [name for name in self.peers if name not in PEERS]:
            raise ValueError(f"unknown --peer {', '.join(unknown)}: choose from {', '.join(PEERS)}")
        if unknown := [name for name in self.workloads if name not in WORKLOADS]:
            known = ", ".join(WORKLOADS)
            raise ValueError(f"unknown --workload {', '.join(unknown)}: choose from {known}")
        if self.variant and self.variant not in (OWN, *PEERS):
            raise ValueError(
                f"--variant must be one of {', '.join((OWN, *PEERS))}, got {self.variant}"
            )
        if self.num_workers < 2:
            raise ValueError(
                "--num-workers must be at least 2, so that there are routing decisions, got "
                f"{self.num_workers}"
            )
        if self.rounds < 1 or self.pace <= 0.0 or self.scale <= 0.0:
            raise ValueError(
                "--rounds must be at least 1, and --pace and --scale greater than 0, got "
                f"{self.rounds}, {self.pace} and {self.scale}"
            )

    @property
    def shape(self) -> FleetShape:
        """Number, limits and speeds of the paced workers."""
        return FleetShape(
            slowness=(self.pace,) * self.num_workers,
            costs=DEFAULT_COSTS,
            num_pages=1500,
            max_num_seqs=64,
            max_num_batched_tokens=512,
        )
