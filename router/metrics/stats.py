"""Plain numbers that the token path adds to; they are turned into metrics only when scraped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from router.metrics.tenants import TenantBook
from worker.wire.exposition import FIRST_TOKEN_BUCKETS, Histogram
from worker.wire.slo import Slo, SloClass, slo_class
from worker.wire.times import FirstTokenTimes

TOKEN_TIME_BUCKETS = (
    0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4,
    0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
"""vLLM's, and finer below its first."""
REQUEST_BUCKETS = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
"""vLLM's, and finer below its first."""
STAGE_BUCKETS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    60.0, 160.0, 640.0,
)  # fmt: skip
"""Bounds of histograms of the parts that a first token's time consists of."""
TOKEN_COUNT_BUCKETS = tuple(float(4**power) for power in range(11))


class LatencyStats:
    """Times of the completions of one SLO class."""

    __slots__ = (
        "first_flush",
        "first_token",
        "inter_token",
        "prefill",
        "queue",
        "request",
        "route",
        "time_per_token",
    )

    def __init__(self) -> None:
        self.first_token = Histogram(FIRST_TOKEN_BUCKETS)
        self.route = Histogram(STAGE_BUCKETS)
        """Arrival until it is on its way to the worker that served it."""
        self.queue = Histogram(STAGE_BUCKETS)
        """Seconds at that worker until it was first admitted."""
        self.prefill = Histogram(STAGE_BUCKETS)
        """Admission at the worker to the first token."""
        self.first_flush = Histogram(STAGE_BUCKETS)
        """First token at the worker until the gateway has written it; of streams."""
        self.inter_token = Histogram(TOKEN_TIME_BUCKETS)
        self.time_per_token = Histogram(TOKEN_TIME_BUCKETS)
        self.request = Histogram(REQUEST_BUCKETS)

    def began(self, first_token_s: float, route_s: float, times: FirstTokenTimes | None) -> None:
        """Counts a first token.

        Args:
            first_token_s: from arrival to it.
            route_s: from arrival until the request was sent to the worker.
            times: what the worker reports; None where it reports nothing.
        """
        self.first_token.observe(first_token_s)
        self.route.observe(route_s)
        if times is not None:
            self.queue.observe(times.queue_s)
            self.prefill.observe(times.prefill_s)


class WorkerTarget(NamedTuple):
    """How many workers a model should have."""

    wanted: int
    """Now, whether they are there or not."""
    least: int
    most: int
    """Bounds of it; the same number where it does not follow the load."""


class ModelStats:
    """Counters of one model in one gateway.

    Args:
        max_tenants: tenants that metrics distinguish; the rest count together.
    """

    __slots__ = (
        "_latencies",
        "achievable_hit_tokens",
        "cached_tokens",
        "completion_tokens",
        "finished",
        "generation_tokens",
        "hit_tokens",
        "pending_requests",
        "pending_tokens",
        "pooled_hit_tokens",
        "prediction_error",
        "prompt_length",
        "prompt_tokens",
        "refused",
        "regret_s",
        "resubmissions",
        "retries",
        "routed",
        "slo",
        "started",
        "tenants",
        "unplaced",
        "workers",
    )

    def __init__(self, max_tenants: int = 32) -> None:
        self.workers = WorkerTarget(1, 1, 1)
        """How many there should be: those of the configuration, until Serve has been asked."""
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
        """Completions that were to continue elsewhere, each time their worker was lost."""
        self.refused = 0
        """Completions that were refused since all queues were full."""
        self.unplaced = 0
        """Completions that there was no worker for."""
        self.pending_requests = 0
        """Completions that no worker has yet."""
        self.pending_tokens = 0
        """Tokens of the pending completions' prompts."""
        self.slo: dict[tuple[int, SloClass, bool], int] = {}
        """Completions with an SLO, by priority, class and whether it was met."""
        self.routed: dict[str, int] = {}
        """Requests by worker."""
        self.started = 0
        """Completions."""
        self.finished: dict[str, int] = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        """Completions by finish reason."""
        self.prediction_error = Histogram(FIRST_TOKEN_BUCKETS)
        """First tokens before or after their time."""
        self.prompt_length = Histogram(TOKEN_COUNT_BUCKETS)
        """Tokens."""
        self.completion_tokens = Histogram(TOKEN_COUNT_BUCKETS)
        self.tenants = TenantBook(max_tenants)
        self._latencies: dict[SloClass, LatencyStats] = {}
        self.latency(None)

    def latency(self, slo: Slo | None) -> LatencyStats:
        """The histogram that counts the times of completions with such an SLO."""
        kind = slo_class(slo)
        found = self._latencies.get(kind)
        if found is None:
            found = self._latencies[kind] = LatencyStats()
        return found

    def latencies(self) -> Sequence[tuple[SloClass, LatencyStats]]:
        """Latencies by SLO class, of the classes that have occurred."""
        return list(self._latencies.items())
