"""GatewayCollector: Prometheus metrics of a gateway, built from its counters when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from router.fleet import Fleet
from router.metrics.http import HttpStats
from router.metrics.stats import LatencyStats, ModelStats
from router.metrics.tenants import TenantBook, TenantStats
from worker.protocol.adapters import AdapterTotals
from worker.protocol.exports import AsCounter, AsGauge, AsHistogram, exported
from worker.protocol.exposition import Histogram

MODEL = ["model_name", "gateway_id"]
"""Names of the labels of a model's metrics."""


class Source(NamedTuple):
    """A model of the gateway, with its counters and workers."""

    model_name: str
    stats: ModelStats
    fleet: Fleet
    adapters: Mapping[str, str] = MappingProxyType({})
    """Versions of the model's LoRA adapters, by name."""


_COUNTERS = exported(ModelStats, AsCounter)
_GAUGES = exported(ModelStats, AsGauge)
_HISTOGRAMS = exported(ModelStats, AsHistogram)
_LATENCIES = exported(LatencyStats, AsHistogram)
_TENANT_COUNTERS = exported(TenantStats, AsCounter)
_COMPUTED_GAUGES: dict[str, tuple[str, Callable[[Source], float]]] = {
    "num_workers_wanted": (
        "Target number of workers.",
        lambda s: s.stats.workers.target,
    ),
    "num_workers_ready": (
        "Number of ready workers.",
        lambda s: sum(worker.ready for worker in s.fleet.workers),
    ),
    "num_workers_min": ("Minimum number of workers.", lambda s: s.stats.workers.minimum),
    "num_workers_max": ("Maximum number of workers.", lambda s: s.stats.workers.maximum),
}


class GatewayCollector(Collector):
    """Yields all metric families of one gateway.

    Counters start at 0 with each gateway process, whose id is a label.

    Args:
        gateway_id: id of the gateway.
        sources: models of the gateway.
        http: counters of HTTP responses.
        created: Unix time in seconds of the gateway's start, for formats with `_created` samples;
            None omits these.
    """

    def __init__(
        self,
        gateway_id: str,
        sources: Sequence[Source],
        http: HttpStats,
        created: float | None = None,
    ) -> None:
        self._gateway_id = gateway_id
        self._sources = sources
        self._http = http
        self._created = created

    def collect(self) -> Iterator[Metric]:
        """All metric families, most with one sample per model."""
        for field, (name, text) in _COUNTERS.items():
            counter = CounterMetricFamily(f"rayfleet_{name}", text, labels=MODEL)
            for source in self._sources:
                count = getattr(source.stats, field)
                counter.add_metric(self._of(source), count, self._created)
            yield counter
        for field, (name, text) in _HISTOGRAMS.items():
            family = HistogramMetricFamily(f"rayfleet_{name}", text, labels=MODEL)
            for source in self._sources:
                self._add(family, self._of(source), getattr(source.stats, field))
            yield family
        for field, (name, text) in _LATENCIES.items():
            labels = [*MODEL, "slo_class"]
            family = HistogramMetricFamily(f"rayfleet_{name}", text, labels=labels)
            for source in self._sources:
                for kind, latency in source.stats.latencies():
                    self._add(family, [*self._of(source), kind], getattr(latency, field))
            yield family
        yield from self._gauges()
        yield self._answers()
        yield self._keys()
        yield self._ignored()
        yield from self._endings()
        yield from self._tenants()
        yield from self._workers()
        yield self._resident_adapters()

    def _gauges(self) -> Iterator[Metric]:
        for field, (name, text) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"rayfleet_{name}", text, labels=MODEL)
            for source in self._sources:
                gauge.add_metric(self._of(source), getattr(source.stats, field))
            yield gauge
        for name, (text, read) in _COMPUTED_GAUGES.items():
            gauge = GaugeMetricFamily(f"rayfleet_{name}", text, labels=MODEL)
            for source in self._sources:
                gauge.add_metric(self._of(source), read(source))
            yield gauge

    def _answers(self) -> Metric:
        labels = ["gateway_id", "route", "method", "status"]
        answers = CounterMetricFamily(
            "rayfleet_http_requests",
            "HTTP responses by route, method and status; streams count when they start.",
            labels=labels,
        )
        for (route, method, status), count in self._http.counts.items():
            answers.add_metric([self._gateway_id, route, method, str(status)], count, self._created)
        return answers

    def _keys(self) -> Metric:
        stale = GaugeMetricFamily(
            "rayfleet_api_keys_stale",
            "1 while a changed API key file is invalid or unreadable; the previous keys are used.",
            labels=["gateway_id"],
        )
        stale.add_metric([self._gateway_id], float(self._http.keys_are_stale()))
        return stale

    def _ignored(self) -> Metric:
        ignored = CounterMetricFamily(
            "rayfleet_ignored_request_fields",
            "Requests with a field, tool or context edit that was ignored, by API and field.",
            labels=["gateway_id", "api", "field"],
        )
        for (api, field), count in self._http.ignored.counts().items():
            ignored.add_metric([self._gateway_id, api, field], count, self._created)
        return ignored

    def _endings(self) -> Iterator[Metric]:
        success = CounterMetricFamily(
            "rayfleet_request_success", "Completions ended.", labels=[*MODEL, "finished_reason"]
        )
        rejections = CounterMetricFamily(
            "rayfleet_admission_rejections",
            "Completions rejected with 429 (queue_full) or 503 (no_worker).",
            labels=[*MODEL, "reason"],
        )
        slo = CounterMetricFamily(
            "rayfleet_slo_requests",
            "Completions with an SLO.",
            labels=[*MODEL, "priority", "slo_class", "met"],
        )
        for source in self._sources:
            labels, stats = self._of(source), source.stats
            for reason, count in stats.finished.items():
                success.add_metric([*labels, reason], count, self._created)
            for reason, count in (("queue_full", stats.rejected), ("no_worker", stats.unplaced)):
                rejections.add_metric([*labels, reason], count, self._created)
            # Both outcomes from the start, since a series without a past has no rate.
            for priority, kind in sorted({(priority, kind) for priority, kind, _ in stats.slo}):
                for met, word in ((True, "true"), (False, "false")):
                    count = stats.slo.get((priority, kind, met), 0)
                    slo.add_metric([*labels, str(priority), kind, word], count, self._created)
        yield from (success, rejections, slo)

    def _tenants(self) -> Iterator[Metric]:
        books = [(self._of(source), source.stats.tenants) for source in self._sources]
        yield from self._groups("tenant", "tenant", "tenant", books)
        adapters = [
            (self._of(source), source.stats.adapters)
            for source in self._sources
            if source.stats.adapters is not None
        ]
        yield from self._groups("lora", "lora_adapter", "LoRA adapter", adapters)

    def _groups(
        self, prefix: str, label: str, word: str, books: Sequence[tuple[list[str], TenantBook]]
    ) -> Iterator[Metric]:
        """Metrics per tenant or per LoRA adapter.

        Args:
            prefix: prefix of the metrics' names.
            label: name of the label with the tenant or adapter.
            word: "tenant" or "LoRA adapter", for help texts.
            books: labels of each model, and its counters by tenant or adapter.
        """
        labels = [*MODEL, label]
        rows = [([*of, name], stats) for of, book in books for name, stats in book.rows()]
        for field, (name, text) in _TENANT_COUNTERS.items():
            counter = CounterMetricFamily(
                f"rayfleet_{prefix}_{name}", text.format(word), labels=labels
            )
            for values, stats in rows:
                counter.add_metric(values, getattr(stats, field), self._created)
            yield counter
        slo = CounterMetricFamily(
            f"rayfleet_{prefix}_slo_requests",
            f"Completions with an SLO, per {word}.",
            labels=[*labels, "met"],
        )
        first = SummaryMetricFamily(
            f"rayfleet_{prefix}_time_to_first_token_seconds",
            f"TTFT in seconds of finished completions, per {word}.",
            labels=labels,
        )
        for values, stats in rows:
            slo.add_metric([*values, "true"], stats.slo_met, self._created)
            slo.add_metric([*values, "false"], stats.slo_missed, self._created)
            first.add_metric(values, stats.first_tokens, stats.first_tokens_s)
        yield from (slo, first)

    def _workers(self) -> Iterator[Metric]:
        """Metrics of workers as seen by this gateway; a worker's series end when it leaves."""
        states = GaugeMetricFamily(
            "rayfleet_workers", "Workers of the model.", labels=[*MODEL, "state"]
        )
        wait = GaugeMetricFamily(
            "rayfleet_expected_wait_seconds",
            "Expected wait of the next request at the best worker, in seconds; infinite if there "
            "are no workers.",
            labels=MODEL,
        )
        routed = CounterMetricFamily(
            "rayfleet_routed_requests",
            "Completions submitted, by worker.",
            labels=[*MODEL, "worker_id"],
        )
        blocks = GaugeMetricFamily(
            "rayfleet_prefix_index_blocks",
            "Blocks in the prefix index.",
            labels=[*MODEL, "worker_id"],
        )
        for source in self._sources:
            labels, fleet = self._of(source), source.fleet
            counts = dict.fromkeys(("ready", "loading", "draining"), 0)
            for worker in fleet.workers:
                loading = "draining" if worker.draining else "loading"
                counts["ready" if worker.ready else loading] += 1
                if worker.info is not None:
                    values = [*labels, worker.worker_id]
                    routed.add_metric(values, source.stats.routed.get(worker.worker_id, 0))
                    blocks.add_metric(values, fleet.index.num_blocks(worker.worker_id))
            for state, count in counts.items():
                states.add_metric([*labels, state], count)
            wait.add_metric(labels, fleet.expected_wait_s())
        yield from (states, wait, routed, blocks)

    def _resident_adapters(self) -> Metric:
        resident = GaugeMetricFamily(
            "rayfleet_lora_resident",
            "1 if the current version of a LoRA adapter is in the memory of a worker.",
            labels=[*MODEL, "worker_id", "lora_adapter", "memory"],
        )
        for source in self._sources:
            names: dict[str, list[str]] = {}
            for name, version in source.adapters.items():
                names.setdefault(version, []).append(name)
            for worker in source.fleet.workers:
                totals = worker.load.adapters or AdapterTotals()
                places = (("device", totals.on_device), ("host", totals.on_host))
                for memory, version in ((m, v) for m, versions in places for v in versions):
                    for name in names.get(version, ()):
                        values = [*self._of(source), worker.worker_id, name, memory]
                        resident.add_metric(values, 1)
        return resident

    def _of(self, source: Source) -> list[str]:
        return [source.model_name, self._gateway_id]

    def _add(
        self, family: HistogramMetricFamily, labels: Sequence[str], histogram: Histogram
    ) -> None:
        family.add_metric(labels, histogram.cumulative(), sum_value=histogram.total)
        if self._created is not None:
            names = (*MODEL, "slo_class")[: len(labels)]
            values = dict(zip(names, labels, strict=True))
            family.add_sample(f"{family.name}_created", values, self._created)
