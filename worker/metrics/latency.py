"""Latency metrics of a worker over all gateways, which reveal a slow GPU among many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from prometheus_client.core import HistogramMetricFamily, Metric

from worker.protocol.exposition import FIRST_TOKEN_BUCKETS, Histogram
from worker.protocol.messages import StepReport

STEP_BUCKETS: Final = (
    0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip
"""Histogram buckets for step times, in seconds: a subset of those for inter-token latency."""


class WorkerLatency:
    """Generated tokens and latencies over all rank groups of a worker, from their reports."""

    def __init__(self) -> None:
        self.first_token = Histogram(FIRST_TOKEN_BUCKETS)
        """Seconds from the arrival of a request at the worker to its first token."""
        self.decode_step = Histogram(STEP_BUCKETS)
        """Duration of decode-only steps, in seconds, which is approximately the inter-token
        latency."""
        self.prefill_step = Histogram(STEP_BUCKETS)
        """Duration of steps that compute prefill or blocks, in seconds."""
        self.generation_tokens = 0
        """Number of tokens generated for requests."""
        self._last_seq = 0

    def add_report(self, report: StepReport) -> None:
        """Adds a report's step and deltas."""
        load = report.load
        shape = load.step_shape
        if shape.seq != self._last_seq:
            self._last_seq = shape.seq
            decodes = shape.decode_rows and not shape.prefill_tokens
            if shape.seq:  # 0 before the first step of an epoch
                (self.decode_step if decodes else self.prefill_step).observe(load.step_ms / 1e3)
        for deltas in report.deltas.values():
            for delta in deltas:
                self.generation_tokens += len(delta.token_ids)
                if delta.times is not None:
                    self.first_token.observe(delta.times.queue_s + delta.times.prefill_s)


def latency_metrics(labels: Sequence[str], latency: WorkerLatency) -> Iterator[Metric]:
    """Latency metric families of a worker; `labels` are values of (model_name, worker_id)."""
    first = HistogramMetricFamily(
        "rayfleet_worker_time_to_first_token_seconds",
        "Time from arrival at the worker to the first token.",
        labels=["model_name", "worker_id"],
    )
    first.add_metric(labels, latency.first_token.cumulative(), latency.first_token.total)
    steps = HistogramMetricFamily(
        "rayfleet_worker_step_seconds",
        "Step time of rank 0, for decode-only steps and steps with prefill or blocks.",
        labels=["model_name", "worker_id", "kind"],
    )
    for kind, times in (("decode", latency.decode_step), ("prefill", latency.prefill_step)):
        steps.add_metric([*labels, kind], times.cumulative(), times.total)
    yield from (first, steps)
