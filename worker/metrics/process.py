"""Metrics of every process: versions, CPU time, memory, and event loop lag."""

from __future__ import annotations

import asyncio
import importlib.metadata
import platform
import resource
from collections.abc import Iterator
from functools import cache
from typing import Final

import psutil
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from worker.protocol.exposition import Histogram

PERIOD_S: Final = 0.5
"""Seconds between probes of the event loop. Each probe wakes an idle process for 0.15 ms, with
cold caches. Ten per second took 10 % of an idle gateway's CPU time."""
LAG_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
"""Histogram buckets for the lag, in seconds: from unnoticeable to the point at which Serve
considers a process dead."""


class LoopLag:
    """Event loop lag: how long callbacks that are due have to wait.

    A probe is due every PERIOD_S even while earlier ones are still waiting, as requests would be,
    which avoids coordinated omission: quantiles are those of requests that arrive at random times.
    """

    def __init__(self) -> None:
        self.histogram = Histogram(LAG_BUCKETS)
        """Lag of all probes in seconds."""

    async def watch(self) -> None:
        """Probes the running event loop until the task is cancelled."""
        clock = asyncio.get_running_loop().time
        due = clock() + PERIOD_S
        while True:
            await asyncio.sleep(due - clock())
            due = self.probe(due, clock())

    def probe(self, due: float, now: float) -> float:
        """Counts the probes due from `due` to `now`; returns when the next one is due."""
        while due <= now:
            self.histogram.observe(now - due)
            due += PERIOD_S
        return due


def process_metrics(process: str, lag: Histogram | None = None) -> Iterator[Metric]:
    """Metric families that every process has, with the label `process`.

    Args:
        process: name of the process.
        lag: lag of its event loop; None if it is not measured.
    """
    labels = ["process"]
    build = InfoMetricFamily(
        "rayfleet_build", "Versions of the software that the process runs.", labels=labels
    )
    versions = {f"{name}_version": version_of(name) for name in ("ray", "torch")}
    python = {"python_version": platform.python_version()}
    build.add_metric([process], {"version": version_of("rayfleet"), **python, **versions})
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu = CounterMetricFamily(
        "rayfleet_process_cpu_seconds", "CPU time of the process.", labels=labels
    )
    cpu.add_metric([process], used.ru_utime + used.ru_stime)
    memory = GaugeMetricFamily(
        "rayfleet_process_resident_memory_bytes", "Resident memory of the process.", labels=labels
    )
    memory.add_metric([process], psutil.Process().memory_info().rss)
    yield from (build, cpu, memory)
    if lag is not None:
        late = HistogramMetricFamily(
            "rayfleet_event_loop_lag_seconds",
            "Time that due callbacks wait for the event loop.",
            labels=labels,
        )
        late.add_metric([process], lag.cumulative(), lag.total)
        yield late


@cache
def version_of(package: str) -> str:
    """Installed version of a package; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
