"""ModelStats: counters of one model in one gateway, as plain numbers that are cheap per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, NamedTuple

from router.metrics.tenants import TenantBook
from worker.protocol.exports import AsCounter, AsGauge, AsHistogram
from worker.protocol.exposition import FIRST_TOKEN_BUCKETS, Histogram
from worker.protocol.slo import Slo, SloClass, slo_class
from worker.protocol.times import FirstTokenTimes

TOKEN_TIME_BUCKETS = (
    0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4,
    0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
"""Histogram buckets for the time between tokens, in seconds: vLLM's, plus finer ones below vLLM's
first bucket."""
REQUEST_BUCKETS = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
"""Histogram buckets for request times, in seconds: vLLM's, plus finer ones below vLLM's first
bucket.
"""
STAGE_BUCKETS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    60.0, 160.0, 640.0,
)  # fmt: skip
"""Histogram buckets for the stages of TTFT, in seconds."""
TOKEN_COUNT_BUCKETS = tuple(float(4**power) for power in range(11))
"""Histogram buckets for numbers of tokens."""


@dataclass(slots=True)
class LatencyStats:
    """Latency histograms of the completions of one SLO class, in seconds."""

    first_token: Annotated[
        Histogram,
        AsHistogram("time_to_first_token_seconds", "Time to first token (TTFT) in seconds."),
    ] = field(default_factory=partial(Histogram, FIRST_TOKEN_BUCKETS))
    """Time from arrival to the first token."""
    route: Annotated[
        Histogram,
        AsHistogram(
            "request_route_time_seconds",
            "Part of TTFT in seconds: arrival to submission to the worker.",
        ),
    ] = field(default_factory=partial(Histogram, STAGE_BUCKETS))
    """Time from arrival until the completion is submitted to the worker that serves it."""
    queue: Annotated[
        Histogram,
        AsHistogram(
            "request_queue_time_seconds",
            "Part of TTFT in seconds: waiting on the worker until admission.",
        ),
    ] = field(default_factory=partial(Histogram, STAGE_BUCKETS))
    """Time from arrival on the worker to the first admission into the batch."""
    prefill: Annotated[
        Histogram,
        AsHistogram(
            "request_prefill_time_seconds",
            "Part of TTFT in seconds: admission to first token.",
        ),
    ] = field(default_factory=partial(Histogram, STAGE_BUCKETS))
    first_flush: Annotated[
        Histogram,
        AsHistogram(
            "request_first_flush_time_seconds",
            "Seconds from the first token on the worker until the gateway has sent it (streams).",
        ),
    ] = field(default_factory=partial(Histogram, STAGE_BUCKETS))
    inter_token: Annotated[
        Histogram,
        AsHistogram("inter_token_latency_seconds", "Inter-token latency (ITL) in seconds."),
    ] = field(default_factory=partial(Histogram, TOKEN_TIME_BUCKETS))
    time_per_token: Annotated[
        Histogram,
        AsHistogram(
            "request_time_per_output_token_seconds",
            "Mean time per output token after the first (TPOT) in seconds.",
        ),
    ] = field(default_factory=partial(Histogram, TOKEN_TIME_BUCKETS))
    """Mean time per output token after the first, observed once per completion."""
    request: Annotated[
        Histogram,
        AsHistogram("e2e_request_latency_seconds", "End-to-end latency in seconds."),
    ] = field(default_factory=partial(Histogram, REQUEST_BUCKETS))
    """Time from arrival to the end of the completion."""

    def began(self, first_token_s: float, route_s: float, times: FirstTokenTimes | None) -> None:
        """Records a first token.

        Args:
            first_token_s: seconds from arrival to the first token.
            route_s: seconds from arrival until the completion was submitted to the worker.
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
    """Current target number of workers."""
    minimum: int
    """Minimum number of workers; equal to `maximum` if autoscaling is disabled."""
    maximum: int
    """Maximum number of workers."""


@dataclass(slots=True)
class ModelStats:
    """Counters of one model in one gateway. Annotated fields are exported as metrics."""

    tenants: TenantBook = field(default_factory=partial(TenantBook, 32))
    adapters: TenantBook | None = None
    """Counters by LoRA adapter; None if LoRA is disabled."""
    workers: WorkerTarget = field(default_factory=partial(WorkerTarget, 1, 1, 1))
    """Target number of workers: the configured number until the target in Serve has been read."""
    prompt_tokens: Annotated[int, AsCounter("prompt_tokens", "Prompt tokens processed.")] = 0
    """Number of prompt tokens of all requests."""
    generation_tokens: Annotated[int, AsCounter("generation_tokens", "Tokens generated.")] = 0
    cached_tokens: Annotated[
        int, AsCounter("prompt_tokens_cached", "Prompt tokens found in prefix caches.")
    ] = 0
    hit_tokens: Annotated[
        int, AsCounter("routing_hit_tokens", "Prompt tokens that routing predicted to be cached.")
    ] = 0
    """Prompt tokens predicted to be in the prefix caches of the chosen workers."""
    saved_tokens: int = 0
    """Tokens among `prompt_tokens` that no worker was expected to compute: the `hit_tokens` of
    each prompt's first completion, before any worker failure."""
    achievable_hit_tokens: Annotated[
        int,
        AsCounter(
            "routing_achievable_hit_tokens",
            "Prompt tokens cached on the worker with the longest cached prefix.",
        ),
    ] = 0
    pooled_hit_tokens: Annotated[
        int,
        AsCounter(
            "routing_pooled_hit_tokens",
            "Prompt tokens that would be hits in a single cache shared by all workers "
            "(--explain-routing).",
        ),
    ] = 0
    regret_s: Annotated[
        float,
        AsCounter(
            "routing_regret_seconds",
            "Sum of predicted TTFT minus the best possible predicted TTFT, in seconds "
            "(--explain-routing).",
        ),
    ] = 0.0
    """Sum of regrets in seconds (see Explanation)."""
    resubmissions: Annotated[
        int,
        AsCounter("resubmissions", "Completions resumed on another worker after a worker failure."),
    ] = 0
    retries: Annotated[int, AsCounter("routing_retries", "Submits retried on another worker.")] = 0
    rejected: int = 0
    """Completions rejected because all workers' queues were full."""
    unplaced: int = 0
    """Completions rejected because no worker was available."""
    pending_requests: Annotated[
        int, AsGauge("gateway_pending_requests", "Completions not yet assigned to a worker.")
    ] = 0
    pending_tokens: Annotated[
        int,
        AsGauge(
            "gateway_pending_tokens", "Prompt tokens of completions not yet assigned to a worker."
        ),
    ] = 0
    waiting_sessions: Annotated[
        int,
        AsGauge(
            "gateway_waiting_sessions",
            "Completions of agent sessions waiting for room in KV caches.",
        ),
    ] = 0
    """Completions waiting at the session gate; included in `pending_requests`."""
    session_wait: Annotated[
        Histogram,
        AsHistogram(
            "session_wait_seconds",
            "Seconds that requests of agent sessions waited for room in KV caches.",
        ),
    ] = field(default_factory=partial(Histogram, REQUEST_BUCKETS))
    slo: dict[tuple[int, SloClass, bool], int] = field(default_factory=dict)
    """Number of completions with an SLO, by priority, class and whether it was met."""
    routed: dict[str, int] = field(default_factory=dict)
    """Number of submitted completions, by worker id."""
    started: int = 0
    """Number of completions that have started."""
    finished: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error"), 0)
    )
    """Number of completions that have ended, by finish reason."""
    prediction_error: Annotated[
        Histogram,
        AsHistogram(
            "routing_prediction_error_seconds",
            "Absolute error of the TTFT predicted by routing, in seconds.",
        ),
    ] = field(default_factory=partial(Histogram, FIRST_TOKEN_BUCKETS))
    prompt_length: Annotated[
        Histogram, AsHistogram("request_prompt_tokens", "Prompt tokens per request.")
    ] = field(default_factory=partial(Histogram, TOKEN_COUNT_BUCKETS))
    completion_tokens: Annotated[
        Histogram,
        AsHistogram("request_generation_tokens", "Generated tokens per finished completion."),
    ] = field(default_factory=partial(Histogram, TOKEN_COUNT_BUCKETS))
    """Generated tokens per completion with finish reason stop or length."""
    _latencies: dict[SloClass, LatencyStats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.latency(None)

    def latency(self, slo: Slo | None) -> LatencyStats:
        """The histograms of completions whose SLO is of this class."""
        kind = slo_class(slo)
        found = self._latencies.get(kind)
        if found is None:
            found = self._latencies[kind] = LatencyStats()
        return found

    def latencies(self) -> Sequence[tuple[SloClass, LatencyStats]]:
        """Histograms of the SLO classes that have occurred."""
        return list(self._latencies.items())
