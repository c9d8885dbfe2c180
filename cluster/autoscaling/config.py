"""Configuration of a model's autoscaling."""

from __future__ import annotations

from dataclasses import dataclass, field

from worker.protocol.admission import option_name

_RARE = {"within": "--autoscaling-config"}
"""Metadata of options that are keys of --autoscaling-config and have no flag of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoscalingConfig:
    """Options of a model's autoscaling: bounds, targets and delays."""

    max_workers: int = 0
    """Most workers; 0 disables autoscaling, which replaces --num-workers."""
    min_workers: int = 1
    """Fewest workers, with --max-workers. 0 stops the last worker of an idle model: the next
    request then waits for a new one, up to `no_worker_timeout_s` of --routing-config."""
    target_load: float = field(default=0.7, metadata=_RARE)
    """Target utilization of the workers: the time that arriving tokens need in full batches, by
    step times fitted to recent steps, as a part of the workers' time."""
    target_queue_delay_ms: float = field(default=1000.0, metadata=_RARE)
    """Longest acceptable queueing delay of the next request, as expected, in milliseconds. While it
    is longer, workers are taken to be always busy, and their throughput is measured."""
    target_kv_usage: float = field(default=0.85, metadata=_RARE)
    """Target part of the KV caches that running and waiting requests take."""
    backlog_horizon_s: float = field(default=30.0, metadata=_RARE)
    """Seconds in which the backlog should be worked off once new workers run. After a start of T
    seconds it may take T * target_load / (1 - target_load) if that is longer: as long as workers
    need that use only the time which the load leaves idle."""
    upscale_delay_s: float = field(default=3.0, metadata=_RARE)
    """Seconds for which more workers must be needed before they are started; longer in proportion
    where a start takes more than 30 s. With no worker the first one is started at once."""
    downscale_delay_s: float = field(default=300.0, metadata=_RARE)
    """Seconds for which much fewer workers must suffice before running ones are stopped; four times
    as long if fewer only just suffice. Doubled, up to eightfold, each time that workers are needed
    again soon after some were stopped."""
    downscale_to_zero_delay_s: float = field(default=600.0, metadata=_RARE)
    """Seconds without any request before the last worker is stopped, with --min-workers 0."""

    def __post_init__(self) -> None:
        if self.max_workers < 0 or self.min_workers < 0:
            raise ValueError("--max-workers and --min-workers must not be negative")
        if self.enabled and self.min_workers > self.max_workers:
            raise ValueError(
                f"--min-workers must be at most --max-workers, got {self.min_workers} and "
                f"{self.max_workers}"
            )
        if not self.enabled and self.min_workers != 1:
            raise ValueError("--min-workers needs --max-workers, which switches autoscaling on")
        for name in ("target_load", "target_kv_usage"):
            if not 0.0 < (value := getattr(self, name)) <= 1.0:
                raise ValueError(
                    f"{option_name(self, name)} must be above 0 and at most 1, got {value}"
                )
        for name in ("target_queue_delay_ms", "backlog_horizon_s"):
            if (value := getattr(self, name)) <= 0.0:
                raise ValueError(f"{option_name(self, name)} must be above 0, got {value}")
        for name in ("upscale_delay_s", "downscale_delay_s", "downscale_to_zero_delay_s"):
            if (value := getattr(self, name)) < 0.0:
                raise ValueError(f"{option_name(self, name)} must not be negative, got {value}")

    @property
    def enabled(self) -> bool:
        """Whether the number of workers follows the load."""
        return self.max_workers > 0

    @property
    def to_zero(self) -> bool:
        """Whether the last worker of an idle model is stopped."""
        return self.enabled and not self.min_workers

    def bounded(self, count: int) -> int:
        """`count`, clamped to the bounds."""
        return max(self.min_workers, min(self.max_workers, count))
