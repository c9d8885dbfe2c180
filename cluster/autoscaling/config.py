"""Configuration of a model's autoscaling."""

from __future__ import annotations

from dataclasses import dataclass, field

from worker.wire.admission import option_name

_RARE = {"within": "--autoscaling-config"}
"""Metadata of options that have no flag of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoscalingConfig:
    """How the number of a model's workers follows its load."""

    max_workers: int = 0
    """Most workers; 0 keeps --num-workers all the time. With it --num-workers is not given."""
    min_workers: int = 1
    """Fewest workers, with --max-workers. 0 lets an idle model go: its next request waits, for up
    to `no_worker_timeout_s` of --routing-config, until a worker has been started."""
    target_load: float = field(default=0.7, metadata=_RARE)
    """Part of the workers' time that the load is to take: the time that the tokens which arrive
    need, as fitted to the steps of late, in batches that are full."""
    target_queue_delay_ms: float = field(default=1000.0, metadata=_RARE)
    """Longest time that the next request should be expected to wait before a worker begins it.
    Where it waits longer, workers are taken to be busy all the time, and what they get done is
    measured."""
    target_kv_usage: float = field(default=0.85, metadata=_RARE)
    """Part of the KV caches that running and waiting requests are to take."""
    backlog_horizon_s: float = field(default=30.0, metadata=_RARE)
    """Seconds in which what waits should be worked off once more workers are there. It may take
    longer after a start of T seconds: T * target_load / (1 - target_load), in which workers do it
    with the time that the load leaves them."""
    upscale_delay_s: float = field(default=3.0, metadata=_RARE)
    """Seconds for which more workers must have been wanted before they are started, longer in
    proportion where a start takes longer than 30 s; from zero the first one is started at once."""
    downscale_delay_s: float = field(default=300.0, metadata=_RARE)
    """Seconds for which fewer workers must have been plenty before any that runs is let go; four
    times as long where they only just suffice, and up to eight times longer after each time that
    one was missed soon after it had gone."""
    downscale_to_zero_delay_s: float = field(default=600.0, metadata=_RARE)
    """Seconds without any request before the last worker is let go, with --min-workers 0."""

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
        """Whether the number of workers follows the load at all."""
        return self.max_workers > 0

    @property
    def to_zero(self) -> bool:
        """Whether there may be no worker at all."""
        return self.enabled and not self.min_workers

    def bounded(self, count: int) -> int:
        """`count`, brought within the bounds."""
        return max(self.min_workers, min(self.max_workers, count))
