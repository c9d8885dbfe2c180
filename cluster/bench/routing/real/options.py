"""The options of `bench router --real`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from cluster.bench.routing.workload import DEFAULT_COSTS, FleetShape

OWN = "rayfleet"
PEERS = ("sglang-router", "ray-prefix", "ray-serve")
Variant = Literal["rayfleet", "sglang-router", "ray-prefix", "ray-serve"]
WORKLOADS = ("shared-prompts", "multi-turn", "sibling-burst", "hot-prefix")


@dataclass(frozen=True, kw_only=True, slots=True)
class RealOptions:
    """Which routers, in front of which workers, for how long."""

    peers: tuple[str, ...] = field(default=(), metadata={"flag": "--peer"})
    """sglang-router (cache_aware), ray-prefix (Ray Serve LLM's PrefixCacheAffinityRouter) or
    ray-serve (Ray Serve's own choice); may be given several times. None named means all."""
    sglang_router: str = "sglang-router"
    """The command that starts sglang-router, of an environment of its own."""
    model: str = ""
    """Folder with a tokenizer; default: the demo model."""
    num_workers: int = 4
    """Paced workers behind each router."""
    pace: float = 2.0
    """How much longer a worker's steps take than the simulation's: at 1 it computes some 6,600
    prompt tokens per second. Traffic is as much sparser."""
    rounds: int = 3
    """Turns of each router, alternated; every turn starts processes of its own."""
    workloads: tuple[str, ...] = ()
    """Workloads, by their names in the simulation: shared-prompts, multi-turn, sibling-burst,
    hot-prefix."""
    scale: float = 1.0
    """Length of the workloads; results are reported for 1."""
    first_seed: int = 1
    """Seed of the first round."""
    plot: str = ""
    """PNG file with hit rates and times to first token."""
    variant: str = ""
    """Measure this one alone, once, and print all its requests: rayfleet or a peer."""

    def __post_init__(self) -> None:
        if unknown := [name for name in self.peers if name not in PEERS]:
            raise ValueError(f"unknown --peer {', '.join(unknown)} (there are {', '.join(PEERS)})")
        if unknown := [name for name in self.workloads if name not in WORKLOADS]:
            known = ", ".join(WORKLOADS)
            raise ValueError(f"unknown --workload {', '.join(unknown)} (--real has {known})")
        if self.variant and self.variant not in (OWN, *PEERS):
            raise ValueError(
                f"--variant must be one of {', '.join((OWN, *PEERS))}, got {self.variant}"
            )
        if self.num_workers < 2:
            raise ValueError("--num-workers must be at least 2: with one there is no choice")
        if self.rounds < 1 or self.pace <= 0.0 or self.scale <= 0.0:
            raise ValueError("--rounds must be at least 1, --pace and --scale above 0")

    @property
    def shape(self) -> FleetShape:
        """The workers."""
        return FleetShape(
            slowness=(self.pace,) * self.num_workers,
            costs=DEFAULT_COSTS,
            num_pages=1500,
            max_num_seqs=64,
            max_num_batched_tokens=512,
        )
