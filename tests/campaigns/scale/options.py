"""What `make check-scale` simulates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleOptions:
    """A fleet, its traffic and its failures. Times are of the simulation unless said otherwise."""

    workers: int = 10_000
    """Workers."""
    blocks: int = 100_000_000
    """Blocks in the index when the traffic begins, over all workers. They have random hashes and
    stand for what full caches hold of earlier traffic: the index cannot tell, and nobody asks for
    them again. What requests compute comes on top, from the workers' own caches."""
    duration_s: float = 30.0
    """Seconds of traffic."""
    rate: float = 0.25
    """Requests per second and worker."""
    failures_per_minute: float = 0.01
    """Part of the workers that die per minute; each comes back empty 5 s later, in a new epoch."""
    slowness: float = 8.0
    """Times of a step over those of a model of 70 billion weights on data-centre GPUs; slow workers
    are busy with fewer requests."""
    num_prefixes: int = 0
    """Prefixes that requests share, their shares after Zipf (0.9). Default 0: one per 4 workers."""
    suffix_len: int = 256
    """Tokens of a prompt after the prefix, which has 512 to 3,072."""
    output_len: int = 8
    """Tokens per completion."""
    num_pages: int = 1024
    """Pages of a worker's own cache, beside those blocks."""
    seed: int = 0
    """Of traffic, failures and hashes."""
    routing_policy: str = "adaptive"
    """Policy that decides."""
    max_workers: int = 0
    """Most workers: above --workers the autoscaler has more join as the load asks for them, and
    leave again. Default 0: it looks on, and what it would want is reported."""
    downscale_delay_s: float = 300.0
    """Seconds for which fewer workers must have sufficed before some leave."""

    def __post_init__(self) -> None:
        for name in ("workers", "duration_s", "rate", "slowness", "suffix_len", "output_len"):
            if getattr(self, name) <= 0:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} must be above 0, got {getattr(self, name)}")
        if self.max_workers and self.max_workers < self.workers:
            raise ValueError("--max-workers must be at least --workers, or 0")
        if self.blocks < 0 or not 0.0 <= self.failures_per_minute <= 1.0:
            raise ValueError("--blocks must be at least 0, --failures-per-minute from 0 to 1")
