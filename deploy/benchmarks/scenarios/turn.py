"""Run of a fleet: traffic from the first request to the end of the last stream."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import uvloop

from cluster.bench.client import Record, Request, completion_request
from cluster.bench.jobs.traffic import Planned
from cluster.bench.load import Load, drive
from cluster.bench.serve import COMPLETIONS
from deploy.benchmarks.scenarios.watch import Moment, Watch
from worker.memory import freeze_gc

_LOOK_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A fleet that an endpoint serves."""

    base_url: str
    """URL of the endpoint, without /v1."""
    name: str
    """Name of the fleet's model."""
    sends_urgency: bool = True
    """Whether requests are sent with their priorities and SLOs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """The traffic of one run and its outcome."""

    planned: Sequence[Planned]
    records: Sequence[Record]
    """Outcome of each request, in the order of `planned`."""
    moments: Sequence[Moment]
    """Metrics of the fleet during the run."""
    base_s: float
    """Unit of SLOs in seconds: the p99 time to first token of an idle fleet."""

    @property
    def duration_s(self) -> float:
        """Seconds from the first request to the end of the last one."""
        start = min(record.start for record in self.records)
        return max(record.start + record.latency for record in self.records) - start


def run_turn(
    target: Target,
    planned: Sequence[Planned],
    base_s: float,
    *,
    concurrency: int | None = None,
    on_record: Callable[[Record], None] | None = None,
    on_moment: Callable[[Moment], None] | None = None,
) -> Turn:
    """Sends traffic to a fleet, and reads its metrics in the meantime.

    Args:
        target: the fleet.
        planned: the traffic.
        base_s: unit of SLOs in seconds; 0 disables SLOs.
        concurrency: maximum number of concurrent requests; None for no limit.
        on_record: called with the record of each finished request.
        on_moment: called with each reading of the metrics.
    """
    load = Load(
        url=target.base_url + COMPLETIONS,
        headers={},
        requests=tuple(_request(target, one, base_s) for one in planned),
        max_concurrency=concurrency,
    )
    watch = Watch(target.base_url, target.name, _LOOK_S, on_moment or (lambda moment: None))
    records = uvloop.run(_drive(load, watch, on_record))
    return Turn(planned=planned, records=records, moments=watch.moments, base_s=base_s)


async def _drive(
    load: Load, watch: Watch, on_record: Callable[[Record], None] | None
) -> list[Record]:
    freeze_gc()  # a pause of the client would count as server latency
    start = time.perf_counter()
    looking = asyncio.create_task(watch.run(start))
    try:
        return await drive(load, start, on_record)
    finally:
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking


def _request(target: Target, planned: Planned, base_s: float) -> Request:
    urgency: dict[str, Any] = {}
    if target.sends_urgency:
        urgency["priority"] = planned.priority
        if base_s:
            urgency["slo"] = {"ttft_ms": 1e3 * planned.slo_factor * base_s}
    return completion_request(
        *(planned.index, target.name, planned.prompt, planned.output_len),
        arrival_s=planned.arrival_s,
        **urgency,
    )
