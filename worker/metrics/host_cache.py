"""Metrics of a worker's host-memory tier, named as in vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from worker.protocol.host_cache import HostCacheTotals

_LABELS = ["model_name", "worker_id"]


def host_cache_metrics(labels: Sequence[str], totals: HostCacheTotals) -> Iterator[Metric]:
    """Metric families of a worker's host-memory tier; all 0 if the tier is disabled.

    Args:
        labels: values of (model_name, worker_id).
        totals: totals of the tier.
    """
    usage = GaugeMetricFamily(
        "rayfleet_cpu_cache_usage_perc",
        "Fraction of the host memory for KV pages that is in use; 1 means all of it.",
        labels=_LABELS,
    )
    usage.add_metric(labels, totals.num_used / max(1, totals.num_pages))
    yield usage
    pages = CounterMetricFamily(
        "rayfleet_kv_offload_pages",
        "KV pages copied to and from host memory.",
        labels=[*_LABELS, "transfer_type"],
    )
    pages.add_metric([*labels, "GPU_to_CPU"], totals.num_stored)
    pages.add_metric([*labels, "CPU_to_GPU"], totals.num_loaded)
    yield pages
    for name, text, count in (
        (
            "external_prefix_cache_hits",
            "Tokens whose KV was loaded from host memory.",
            totals.num_hit_tokens,
        ),
        (
            "kv_offload_load_time_seconds",
            "Total time spent loading KV pages from host memory, in seconds.",
            totals.load_s,
        ),
        (
            "kv_offload_evicted_pages",
            "KV pages evicted from host memory without reuse.",
            totals.num_evicted,
        ),
        (
            "kv_offload_recomputed_pages",
            "KV pages recomputed although they were in host memory.",
            totals.num_recomputed,
        ),
    ):
        family = CounterMetricFamily(f"rayfleet_{name}", text, labels=_LABELS)
        family.add_metric(labels, count)
        yield family
