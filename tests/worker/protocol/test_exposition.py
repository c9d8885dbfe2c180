"""Our rendering of metrics, compared with prometheus_client's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from worker.protocol.exposition import OPENMETRICS, TEXT, content_type_for, merge, render

HARD = 'a "quoted"\\ name\nof two lines'


class Everything(Collector):
    def __init__(self, created: float | None) -> None:
        self.created = created

    def collect(self) -> Iterator[Metric]:
        counter = CounterMetricFamily("c", HARD, labels=["z", "a"])
        counter.add_metric([HARD, "plain"], 3, self.created)
        gauge = GaugeMetricFamily("g", "Gauge.")
        for value in (float("inf"), float("-inf"), float("nan"), 1e-7, 12345.0, 7):
            gauge.add_metric([], value)
        histogram = HistogramMetricFamily("h", "Histogram.", labels=["x"])
        histogram.add_metric(["1"], [("0.5", 1), ("+Inf", 2)], sum_value=4.5)
        summary = SummaryMetricFamily("s", "Summary.", labels=["x"])
        summary.add_metric(["1"], 2, 4.5)
        info = InfoMetricFamily("i", "Info.", labels=["x"])
        info.add_metric(["1"], {"size": "4"})
        yield from (counter, gauge, histogram, summary, info)


@pytest.mark.parametrize(
    ("content_type", "theirs", "created"),
    [(TEXT, generate_latest, None), (OPENMETRICS, generate_openmetrics, 1.5)],
)
def test_text_is_what_prometheus_client_writes(content_type, theirs, created) -> None:
    collector = Everything(created)
    registry = CollectorRegistry()
    registry.register(collector)
    own = render(collector.collect(), content_type)
    assert own.decode() == theirs(registry).decode()
    assert merge([own], content_type) == own


def test_the_older_format_has_no_created_samples() -> None:
    assert b"_created" not in render(Everything(1.5).collect(), TEXT)
    assert b"c_created" in render(Everything(1.5).collect(), OPENMETRICS)


def test_the_scraper_chooses_the_format() -> None:
    assert content_type_for("application/openmetrics-text;version=1.0.0;q=0.6,*/*") == OPENMETRICS
    assert content_type_for("*/*") == content_type_for("") == TEXT
