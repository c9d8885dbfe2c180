"""Plain numbers that the token path adds to; they are turned into metrics only when scraped."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

TOKEN_TIME_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0,
)  # fmt: skip
FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0,
)  # fmt: skip


class Histogram:
    """Counts by bucket. Not thread-safe: it belongs to the event loop."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Adds `count` times `value`."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def cumulative(self) -> list[tuple[str, int]]:
        """(upper bound, count up to it) as Prometheus wants them."""
        names = [*(str(bound) for bound in self.bounds), "+Inf"]
        running = 0
        rows = []
        for name, count in zip(names, self.counts, strict=True):
            running += count
            rows.append((name, running))
        return rows


class ModelStats:
    """Counters of one model in one gateway."""

    __slots__ = (
        "achievable_hit_tokens",
        "cached_tokens",
        "finished",
        "first_token",
        "generation_tokens",
        "hit_tokens",
        "inter_token",
        "pooled_hit_tokens",
        "prediction_error",
        "prompt_tokens",
        "refused",
        "regret_s",
        "request",
        "resubmissions",
        "retries",
        "routed",
        "slo",
        "time_per_token",
    )

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.cached_tokens = 0
        """Prompt tokens that workers found in their prefix caches."""
        self.hit_tokens = 0
        """Prompt tokens that routing expected to find there."""
        self.achievable_hit_tokens = 0
        """Prompt tokens that the worker that held most of the prompt would have been expected to
        find."""
        self.pooled_hit_tokens = 0
        """Prompt tokens that one cache for all workers would have had; where explained."""
        self.regret_s = 0.0
        """Expected first tokens over the earliest expected ones; where explained."""
        self.retries = 0
        self.resubmissions = 0
        """Completions that were to go on elsewhere, each time their worker was lost."""
        self.refused = 0
        """Completions that no worker had room for in its queue."""
        self.slo: dict[tuple[int, bool], int] = {}
        """Completions with an SLO, by priority and whether it was met."""
        self.routed: dict[str, int] = {}
        """Requests by worker."""
        self.finished: dict[str, int] = {}
        """Completions by finish reason."""
        self.first_token = Histogram(FIRST_TOKEN_BUCKETS)
        self.prediction_error = Histogram(FIRST_TOKEN_BUCKETS)
        """First tokens before or after their time."""
        self.inter_token = Histogram(TOKEN_TIME_BUCKETS)
        self.time_per_token = Histogram(TOKEN_TIME_BUCKETS)
        self.request = Histogram(REQUEST_BUCKETS)
