"""Times by bucket: what a process adds to as things happen, and Prometheus reads."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
"""vLLM's."""


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
