"""Prometheus metrics, read from the gateway's own state when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from router.fleet import Fleet, WorkerState
from router.metrics.host_cache import host_cache_metrics
from router.metrics.speculation import speculation_metrics
from router.metrics.stats import Histogram, ModelStats
from worker.wire.messages import BlockTotals, StepTimes

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

MODEL = ["model_name"]
WORKER = ["model_name", "worker_id"]

Source = tuple[str, ModelStats, Fleet]
"""Model name, its counters, its workers."""

_COUNTERS: dict[str, tuple[str, Callable[[ModelStats], float]]] = {
    "prompt_tokens": ("Prompt tokens taken.", lambda s: s.prompt_tokens),
    "generation_tokens": ("Tokens generated.", lambda s: s.generation_tokens),
    "prompt_tokens_cached": ("Prompt tokens found in prefix caches.", lambda s: s.cached_tokens),
    "routing_hit_tokens": ("Prompt tokens that routing expected cached.", lambda s: s.hit_tokens),
    "requests_refused": ("Completions answered with 429: queues are full.", lambda s: s.refused),
    "routing_achievable_hit_tokens": (
        "Prompt tokens in the cache of the worker that held most of the prompt.",
        lambda s: s.achievable_hit_tokens,
    ),
    "routing_pooled_hit_tokens": (
        "Prompt tokens that one cache for all workers would have had (--explain-routing).",
        lambda s: s.pooled_hit_tokens,
    ),
    "routing_regret_seconds": (
        "Expected first tokens over the earliest expected ones (--explain-routing).",
        lambda s: s.regret_s,
    ),
    "resubmissions": (
        "Completions handed to another worker because theirs was lost.",
        lambda s: s.resubmissions,
    ),
    "routing_retries": ("Submits that were repeated on another worker.", lambda s: s.retries),
}
_HISTOGRAMS: dict[str, tuple[str, Callable[[ModelStats], Histogram]]] = {
    "time_to_first_token_seconds": ("Arrival to first token.", lambda s: s.first_token),
    "routing_prediction_error_seconds": (
        "First tokens before or after the time that routing expected.",
        lambda s: s.prediction_error,
    ),
    "inter_token_latency_seconds": ("From one token to the next.", lambda s: s.inter_token),
    "request_time_per_output_token_seconds": (
        "Mean time per token after the first, by request.",
        lambda s: s.time_per_token,
    ),
    "e2e_request_latency_seconds": ("Arrival to last token.", lambda s: s.request),
}
_GAUGES: dict[str, tuple[str, Callable[[WorkerState], float]]] = {
    "num_requests_running": ("Requests in the running batch.", lambda w: w.load.num_running),
    "num_requests_waiting": ("Requests waiting at the worker.", lambda w: w.load.num_waiting),
    "kv_cache_usage_perc": ("KV pages in use; 1 is all.", lambda w: _usage(w)),
}
_BLOCKS: dict[str, tuple[str, Callable[[BlockTotals], int]]] = {
    "forwards": ("Forward passes of block diffusion.", lambda b: b.num_forwards),
    "rounds": ("Passes that found something to decide, by block.", lambda b: b.num_rounds),
    "block_passes": ("Passes of running blocks, by block.", lambda b: b.num_passes),
    "tokens": ("Tokens of blocks that were done.", lambda b: b.num_tokens),
}
_STEP_PHASES: dict[str, tuple[str, Callable[[StepTimes], float]]] = {
    "schedule": ("Deciding the step.", lambda t: t.schedule),
    "broadcast": ("Sending the step to the ranks.", lambda t: t.broadcast),
    "prepare": ("Rank 0: tables and input tensors.", lambda t: t.prepare),
    "forward": ("Rank 0: the model.", lambda t: t.forward),
    "sample": ("Rank 0: drawing tokens.", lambda t: t.sample),
    "collect": ("Waiting for the step's result.", lambda t: t.collect),
    "process": ("Applying the result.", lambda t: t.process),
    "deliver": ("Between two turns: reports out, requests in.", lambda t: t.deliver),
    "bubble": ("Rank 0 idle before the step while there was work.", lambda t: t.bubble),
}


class GatewayCollector(Collector):
    """Yields all families; a worker that is gone has no series because it is not there to read."""

    def __init__(self, sources: Callable[[], Iterable[Source]]) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        sources = list(self._sources())
        for name, (text, count) in _COUNTERS.items():
            counter = CounterMetricFamily(f"rayfleet_{name}", text, labels=MODEL)
            for model, stats, _ in sources:
                counter.add_metric([model], count(stats))
            yield counter
        for name, (text, select) in _HISTOGRAMS.items():
            family = HistogramMetricFamily(f"rayfleet_{name}", text, labels=MODEL)
            for model, stats, _ in sources:
                histogram = select(stats)
                family.add_metric([model], histogram.cumulative(), sum_value=histogram.total)
            yield family
        for name, (text, read) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"rayfleet_{name}", text, labels=WORKER)
            for model, _, fleet in sources:
                for worker in fleet.workers:
                    if worker.info is not None:
                        gauge.add_metric([model, worker.worker_id], read(worker))
            yield gauge
        for name, (text, total) in _BLOCKS.items():
            totals = CounterMetricFamily(f"rayfleet_diffusion_{name}", text, labels=WORKER)
            for model, _, fleet in sources:
                for worker in fleet.workers:
                    if worker.info is not None and worker.load.blocks is not None:
                        totals.add_metric([model, worker.worker_id], total(worker.load.blocks))
            yield totals
        for name, (text, seconds) in _STEP_PHASES.items():
            phase = SummaryMetricFamily(f"rayfleet_step_{name}_seconds", text, labels=WORKER)
            for model, _, fleet in sources:
                for worker in fleet.workers:
                    if worker.info is not None:
                        times = worker.load.step_times
                        labels = [model, worker.worker_id]
                        phase.add_metric(labels, times.num_steps, seconds(times))
            yield phase
        yield from _labelled_counters(sources)
        yield from speculation_metrics(
            ([model, worker.worker_id], worker.load.speculation)
            for model, _, fleet in sources
            for worker in fleet.workers
            if worker.load.speculation is not None
        )
        yield from host_cache_metrics(
            ([model, worker.worker_id], worker.load.host_cache, worker.info.page_size)
            for model, _, fleet in sources
            for worker in fleet.workers
            if worker.info is not None and worker.load.host_cache is not None
        )


def render(collector: GatewayCollector) -> bytes:
    """The scrape's body."""
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry)


def _labelled_counters(sources: list[Source]) -> Iterator[Metric]:
    success = CounterMetricFamily(
        "rayfleet_request_success", "Completions ended.", labels=[*MODEL, "finished_reason"]
    )
    routed = CounterMetricFamily(
        "rayfleet_routed_requests", "Completions by the worker they went to.", labels=WORKER
    )
    blocks = GaugeMetricFamily(
        "rayfleet_prefix_index_blocks", "Blocks in the prefix index.", labels=WORKER
    )
    slo = CounterMetricFamily(
        "rayfleet_slo_requests", "Completions with an SLO.", labels=[*MODEL, "priority", "met"]
    )
    preemptions = CounterMetricFamily(
        "rayfleet_preemptions", "Requests taken back from the running batch.", labels=WORKER
    )
    for model, stats, fleet in sources:
        for (priority, met), count in sorted(stats.slo.items()):
            slo.add_metric([model, str(priority), str(met).lower()], count)
        for reason, count in sorted(stats.finished.items()):
            success.add_metric([model, reason], count)
        for worker in fleet.workers:
            if worker.info is not None:
                labels = [model, worker.worker_id]
                preemptions.add_metric(labels, worker.load.num_preemptions)
                routed.add_metric(labels, stats.routed.get(worker.worker_id, 0))
                blocks.add_metric(labels, fleet.index.num_blocks(worker.worker_id))
    yield slo
    yield preemptions
    yield success
    yield routed
    yield blocks


def _usage(worker: WorkerState) -> float:
    total = worker.load.num_total_pages
    return 1.0 - worker.load.num_free_pages / total if total else 0.0
