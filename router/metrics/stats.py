"""ModelStats: counters of one model in one gateway, as plain numbers that are cheap per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from router.metrics.tenants import TenantBook
from worker.protocol.exposition import FIRST_TOKEN_BUCKETS, Histogram
from worker.protocol.slo import Slo, SloClass, slo_class
from worker.protocol.times import FirstTokenTimes

TOKEN_TIME_BUCKETS = (
    0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4,
    0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
"""Histogram bounds in seconds of times between tokens: vLLM's, and finer ones below its first."""
REQUEST_BUCKETS = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
"""Histogram bounds in seconds of request times: vLLM's, and finer ones below its first."""
STAGE_BUCKETS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    60.0, 160.0, 640.0,
)  # fmt: skip
"""Histogram bounds in seconds of parts of the time to first token."""
TOKEN_COUNT_BUCKETS = tuple(float(4**power) for power in range(11))
"""Histogram bounds of numbers of tokens."""


class LatencyStats:
    """Histograms in seconds of completion latencies of one SLO class."""

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
        """Arrival to first token (TTFT)."""
        self.route = Histogram(STAGE_BUCKETS)
        """Arrival to the submit to the worker that served the completion."""
        self.queue = Histogram(STAGE_BUCKETS)
        """Arrival on that worker to its first admission into the batch."""
        self.prefill = Histogram(STAGE_BUCKETS)
        """First admission on the worker to the first token."""
        self.first_flush = Histogram(STAGE_BUCKETS)
        """First token on the worker until the gateway has sent it, for streams."""
        self.inter_token = Histogram(TOKEN_TIME_BUCKETS)
        """One token to the next (ITL)."""
        self.time_per_token = Histogram(TOKEN_TIME_BUCKETS)
        """Mean time per token after the first (TPOT), per completion."""
        self.request = Histogram(REQUEST_BUCKETS)
        """Arrival to the end of the completion."""

    def began(self, first_token_s: float, route_s: float, times: FirstTokenTimes | None) -> None:
        """Records a first token.

        Args:
            first_token_s: seconds from arrival to the first token.
            route_s: seconds from arrival to the submit to the worker.
            times: times reported by the worker; None if it reports none.
        """
        self.first_token.observe(first_token_s)
        self.route.observe(route_s)
        if times is not None:
            self.queue.observe(times.queue_s)
            self.prefill.observe(times.prefill_s)


class WorkerTarget(NamedTuple):
    """Target number of workers of a model, with its bounds."""

    target: int
    """Current target."""
    minimum: int
    """Minimum; equal to `maximum` without autoscaling."""
    maximum: int
    """Maximum."""


class ModelStats:
    """Counters of one model in one gateway.

    Args:
        max_tenants: maximum number of tenants with separate counters; others are counted together.
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
        "regret_s",
        "rejected",
        "resubmissions",
        "retries",
        "routed",
        "saved_tokens",
        "session_wait",
        "slo",
        "started",
        "tenants",
        "unplaced",
        "waiting_sessions",
        "workers",
    )

    def __init__(self, max_tenants: int = 32) -> None:
        self.workers = WorkerTarget(1, 1, 1)
        """Target number of workers: the configured number until Serve has been queried."""
        self.prompt_tokens = 0
        """Prompt tokens of requests."""
        self.generation_tokens = 0
        """Tokens generated."""
        self.cached_tokens = 0
        """Prompt tokens that workers found in their prefix caches."""
        self.hit_tokens = 0
        """Prompt tokens predicted to be in the prefix caches of the chosen workers."""
        self.saved_tokens = 0
        """Tokens among `prompt_tokens` that no worker was expected to compute: the `hit_tokens` of
        each prompt's first completion, before any worker failure."""
        self.achievable_hit_tokens = 0
        """Prompt tokens predicted to be in the prefix caches of the workers with the longest
        hits."""
        self.pooled_hit_tokens = 0
        """Prompt tokens that a single cache for all workers would have had, if decisions are
        explained."""
        self.regret_s = 0.0
        """Sum of regrets (see Explanation), if decisions are explained."""
        self.retries = 0
        """Submits that failed and were retried on another worker."""
        self.resubmissions = 0
        """Worker failures after which a completion was resumed elsewhere."""
        self.rejected = 0
        """Completions rejected because all workers' queues were full."""
        self.unplaced = 0
        """Completions rejected because no worker was available."""
        self.pending_requests = 0
        """Completions not on a worker yet."""
        self.pending_tokens = 0
        """Prompt tokens of completions not on a worker yet."""
        self.waiting_sessions = 0
        """Completions of agent sessions among `pending_requests` that wait for room in caches."""
        self.session_wait = Histogram(REQUEST_BUCKETS)
        """Histogram of the seconds that completions of agent sessions waited for room in caches."""
        self.slo: dict[tuple[int, SloClass, bool], int] = {}
        """Number of completions with an SLO, by priority, class and whether it was met."""
        self.routed: dict[str, int] = {}
        """Number of completions submitted, by worker id."""
        self.started = 0
        """Number of completions started."""
        self.finished: dict[str, int] = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        """Number of completions ended, by finish reason."""
        self.prediction_error = Histogram(FIRST_TOKEN_BUCKETS)
        """Histogram of the absolute error in seconds of predicted times to first token."""
        self.prompt_length = Histogram(TOKEN_COUNT_BUCKETS)
        """Histogram of tokens per prompt."""
        self.completion_tokens = Histogram(TOKEN_COUNT_BUCKETS)
        """Histogram of tokens per completion with finish reason stop or length."""
        self.tenants = TenantBook(max_tenants)
        self._latencies: dict[SloClass, LatencyStats] = {}
        self.latency(None)

    def latency(self, slo: Slo | None) -> LatencyStats:
        """The histograms of completions with an SLO of this class."""
        kind = slo_class(slo)
        found = self._latencies.get(kind)
        if found is None:
            found = self._latencies[kind] = LatencyStats()
        return found

    def latencies(self) -> Sequence[tuple[SloClass, LatencyStats]]:
        """Histograms of the SLO classes that have occurred."""
        return list(self._latencies.items())
