"""Totals of a worker's host-memory tier as Prometheus samples."""

from __future__ import annotations

from worker.metrics.host_cache import host_cache_metrics
from worker.protocol.host_cache import HostCacheTotals


def test_every_total_is_a_sample_under_its_labels() -> None:
    totals = HostCacheTotals(
        num_pages=8,
        num_used=2,
        num_stored=9,
        num_loaded=4,
        num_evicted=3,
        load_s=0.5,
        num_hit_tokens=64,
    )
    samples = {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in host_cache_metrics(["demo", "w"], totals)
        for sample in family.samples
    }
    labels = ("demo", "w")
    assert samples["rayfleet_cpu_cache_usage_perc", labels] == 0.25
    assert samples["rayfleet_external_prefix_cache_hits_total", labels] == 64
    assert samples["rayfleet_kv_offload_pages_total", (*labels, "GPU_to_CPU")] == 9
    assert samples["rayfleet_kv_offload_pages_total", (*labels, "CPU_to_GPU")] == 4
    assert samples["rayfleet_kv_offload_load_time_seconds_total", labels] == 0.5
    assert samples["rayfleet_kv_offload_evicted_pages_total", labels] == 3
    assert samples["rayfleet_kv_offload_recomputed_pages_total", labels] == 0
