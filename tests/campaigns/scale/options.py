"""Options of `make check-scale`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleOptions:
    """A fleet, its traffic and its failures. Times are simulated unless stated otherwise."""

    workers: int = 10_000
    """Number of workers."""
    blocks: int = 100_000_000
    """Blocks in the index at the start of the traffic, over all workers. They have random hashes,
    and represent cached blocks of earlier traffic that no request hits. Blocks of simulated
    requests are added from the workers' own caches."""
    duration_s: float = 30.0
    """Seconds of traffic."""
    rate: float = 0.25
    """Requests per second and worker."""
    failures_per_minute: float = 0.01
    """Fraction of the workers that fail per minute; each returns with an empty cache 5 s later, in
    a new epoch."""
    slowness: float = 8.0
    """Step time as a multiple of the step time of a 70B model on data-center GPUs; slower workers
    are busy with fewer requests."""
    num_prefixes: int = 0
    """Number of shared prefixes, with Zipf (0.9) popularity; 0 uses one per 4 workers."""
    suffix_len: int = 256
    """Prompt tokens after the prefix of 512 to 3,072 tokens."""
    output_len: int = 8
    """Tokens per completion."""
    num_pages: int = 1024
    """Pages in a worker's own cache, in addition to `blocks`."""
    seed: int = 0
    """Seed of traffic, failures and hashes."""
    routing_policy: str = "adaptive"
    """Routing policy."""
    max_workers: int = 0
    """Maximum number of workers. Under load, the autoscaler adds workers beyond --workers, and
    later removes them. At 0, its decisions are only reported."""
    downscale_delay_s: float = 300.0
    """Seconds for which fewer workers must have been sufficient before some are removed."""

    def __post_init__(self) -> None:
        for name in ("workers", "duration_s", "rate", "slowness", "suffix_len", "output_len"):
            if getattr(self, name) <= 0:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} must be greater than 0, got {getattr(self, name)}")
        if self.max_workers and self.max_workers < self.workers:
            raise ValueError("--max-workers must be at least --workers, or 0")
        if self.blocks < 0 or not 0.0 <= self.failures_per_minute <= 1.0:
            raise ValueError("--blocks must be at least 0, --failures-per-minute from 0 to 1")
