"""Configuration of a model's autoscaling."""

from __future__ import annotations

from dataclasses import dataclass, field

from worker.protocol.options import option_name

_RARE = {"within": "--autoscaling-config"}
"""Metadata of options that are keys of --autoscaling-config and have no separate flag."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoscalingConfig:
    """Options of a model's autoscaling: bounds, targets and delays."""

    max_workers: int = 0
    """Maximum number of workers; setting it enables autoscaling, which replaces --num-workers. 0
    disables autoscaling."""
    min_workers: int = 1
    """Minimum number of workers if --max-workers is set. 0 scales an idle model to zero: the next
    request waits for a new worker, up to `no_worker_timeout_s` of --routing-config."""
    target_load: float = field(default=0.7, metadata=_RARE)
    """Target utilization of workers: the time to process arriving tokens in full batches, estimated
    from recent steps, as a fraction of the workers' time."""
    target_queue_delay_ms: float = field(default=1000.0, metadata=_RARE)
    """Maximum acceptable expected queueing delay of the next request, in milliseconds. While it is
    exceeded, workers are treated as saturated, and their throughput is measured."""
    target_kv_usage: float = field(default=0.85, metadata=_RARE)
    """Target fraction of the KV caches used by running and waiting requests."""
    backlog_horizon_s: float = field(default=30.0, metadata=_RARE)
    """Time in seconds to clear the backlog once new workers run. At least T * target_load / (1 -
    target_load) for a startup time of T seconds: workers at the target load need that long to clear
    what arrived during a start."""
    upscale_delay_s: float = field(default=3.0, metadata=_RARE)
    """Delay before scaling up, in seconds: the load must stay high for this long; longer, in
    proportion, if a start takes more than 30 s. The first worker is started without delay."""
    downscale_delay_s: float = field(default=300.0, metadata=_RARE)
    """Delay before scaling down, in seconds: the load must stay low for this long (four times as
    long if the remaining workers would be close to their targets). Doubles, up to 8x, each time
    workers are needed again soon after a scale-down."""
    downscale_to_zero_delay_s: float = field(default=600.0, metadata=_RARE)
    """Delay without requests, in seconds, before the last worker is stopped if --min-workers is 0.
    """

    def __post_init__(self) -> None:
        if self.max_workers < 0 or self.min_workers < 0:
            raise ValueError(
                "--max-workers and --min-workers must not be negative, got "
                f"{self.max_workers} and {self.min_workers}"
            )
        if self.enabled and self.min_workers > self.max_workers:
            raise ValueError(
                f"--min-workers must be at most --max-workers, got {self.min_workers} and "
                f"{self.max_workers}"
            )
        if not self.enabled and self.min_workers != 1:
            raise ValueError(
                "--min-workers needs --max-workers, which enables autoscaling: set both"
            )
        for name in ("target_load", "target_kv_usage"):
            if not 0.0 < (value := getattr(self, name)) <= 1.0:
                raise ValueError(f"{option_name(self, name)} must be in (0, 1], got {value}")
        for name in ("target_queue_delay_ms", "backlog_horizon_s"):
            if (value := getattr(self, name)) <= 0.0:
                raise ValueError(f"{option_name(self, name)} must be greater than 0, got {value}")
        for name in ("upscale_delay_s", "downscale_delay_s", "downscale_to_zero_delay_s"):
            if (value := getattr(self, name)) < 0.0:
                raise ValueError(f"{option_name(self, name)} must not be negative, got {value}")

    @property
    def enabled(self) -> bool:
        """Whether the number of workers is scaled with the load."""
        return self.max_workers > 0

    @property
    def to_zero(self) -> bool:
        """Whether an idle model is scaled to zero workers."""
        return self.enabled and not self.min_workers

    def bounded(self, count: int) -> int:
        """`count`, clamped to the bounds."""
        return max(self.min_workers, min(self.max_workers, count))
