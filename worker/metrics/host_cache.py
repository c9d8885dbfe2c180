"""What workers report of their host-memory tiers, as Prometheus families by vLLM's names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from worker.wire.host_cache import HostCacheTotals

_LABELS = ["model_name", "worker_id"]
_TO_HOST, _TO_DEVICE = "GPU_to_CPU", "CPU_to_GPU"


def host_cache_metrics(
    workers: Iterable[tuple[list[str], HostCacheTotals, int]],
) -> Iterator[Metric]:
    """Families of the workers that have such a tier.

    Args:
        workers: label values (model, worker), totals and page size of each.
    """
    usage = GaugeMetricFamily(
        "rayfleet_cpu_cache_usage_perc",
        "Host memory for KV pages in use; 1 is all.",
        labels=_LABELS,
    )
    hits = CounterMetricFamily(
        "rayfleet_external_prefix_cache_hits",
        "Tokens whose KV came back from host memory.",
        labels=_LABELS,
    )
    pages = CounterMetricFamily(
        "rayfleet_kv_offload_pages",
        "KV pages copied to and from host memory.",
        labels=[*_LABELS, "transfer_type"],
    )
    time = CounterMetricFamily(
        "rayfleet_kv_offload_load_time_seconds",
        "Time of the copies from host memory.",
        labels=_LABELS,
    )
    evicted = CounterMetricFamily(
        "rayfleet_kv_offload_evicted_pages",
        "KV pages that left host memory unused.",
        labels=_LABELS,
    )
    recomputed = CounterMetricFamily(
        "rayfleet_kv_offload_recomputed_pages",
        "KV pages computed again though host memory had them.",
        labels=_LABELS,
    )
    for values, totals, page_size in workers:
        usage.add_metric(values, totals.num_used / max(1, totals.num_pages))
        hits.add_metric(values, totals.num_loaded * page_size)
        pages.add_metric([*values, _TO_HOST], totals.num_stored)
        pages.add_metric([*values, _TO_DEVICE], totals.num_loaded)
        time.add_metric(values, totals.load_s)
        evicted.add_metric(values, totals.num_evicted)
        recomputed.add_metric(values, totals.num_recomputed)
    yield from (usage, hits, pages, time, evicted, recomputed)
