"""Metrics of a worker's LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from worker.protocol.adapters import AdapterTotals
from worker.protocol.exports import AsCounter, AsGauge, exported

_LABELS = ["model_name", "worker_id"]


def adapter_metrics(labels: Sequence[str], totals: AdapterTotals) -> Iterator[Metric]:
    """Metric families of a worker's adapters; all 0 if adapters are disabled.

    Args:
        labels: values of (model_name, worker_id).
        totals: adapters in the worker's memory, and totals of loading them.
    """
    for field, (name, text) in exported(AdapterTotals, AsGauge).items():
        gauge = GaugeMetricFamily(f"rayfleet_{name}", text, labels=_LABELS)
        gauge.add_metric(labels, getattr(totals, field))
        yield gauge
    places = GaugeMetricFamily(
        "rayfleet_lora_adapters", "LoRA adapters in memory.", labels=[*_LABELS, "memory"]
    )
    places.add_metric([*labels, "device"], len(totals.on_device))
    places.add_metric([*labels, "host"], len(totals.on_host))
    yield places
    for field, (name, text) in exported(AdapterTotals, AsCounter).items():
        counter = CounterMetricFamily(f"rayfleet_{name}", text, labels=_LABELS)
        counter.add_metric(labels, getattr(totals, field))
        yield counter
