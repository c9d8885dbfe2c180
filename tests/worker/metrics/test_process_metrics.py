"""Metrics of every process."""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from worker.metrics.node import NodeMetrics
from worker.metrics.process import PERIOD_S, LoopLag


def test_a_loop_that_is_on_time_has_no_lag() -> None:
    lag, due = LoopLag(), 1.0
    for probe in range(50):
        due = lag.probe(due, 1.0 + probe * PERIOD_S + 1e-4)
    assert sum(lag.histogram.counts) == 50
    assert lag.histogram.counts[0] == 50


def test_one_stall_counts_for_as_long_as_it_lasts() -> None:
    lag = LoopLag()
    due = lag.probe(1.0, 1.0 + 29.5 * PERIOD_S)
    assert due == pytest.approx(1.0 + 30 * PERIOD_S)
    counts = dict(lag.histogram.cumulative())
    assert counts["+Inf"] == 30, "everything that arrived in this time had to wait"
    assert counts["+Inf"] - counts["5.0"] == 20
    assert lag.histogram.total == pytest.approx(30 * 15 * PERIOD_S)


async def test_a_blocked_event_loop_is_seen_in_a_scrape(tmp_path: Path) -> None:
    metrics = NodeMetrics("gateway g", lambda _: b"", str(tmp_path / "m"))
    await metrics.open()
    try:
        await asyncio.sleep(0)
        time.sleep(1.5 * PERIOD_S)  # a coroutine must not do this
        await asyncio.sleep(0.1 * PERIOD_S)
        body, _ = await metrics.gather()
    finally:
        metrics.close()
    found = {s.name: s for family in parse(body.decode()) for s in family.samples}
    assert found["rayfleet_event_loop_lag_seconds_sum"].value > 0.4 * PERIOD_S
    build = found["rayfleet_build_info"].labels
    assert build["process"] == "gateway g"
    assert build["version"] == importlib.metadata.version("rayfleet")
    assert build["ray_version"] == importlib.metadata.version("ray")
