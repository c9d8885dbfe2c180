"""`make check-overload`: a fleet under ten times its capacity.

Requests that do not fit into the queues must get a 429 with Retry-After, all others must finish,
and memory must stay constant. Processes, HTTP and engine are real.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.bench.arrivals import arrival_times
from cluster.bench.client import Record, Request, completion_request
from cluster.bench.load import Load, LoadResult, run_load
from cluster.bench.report import Check, Result, at_least, at_most, checks_json, exactly, note
from cluster.launch import APPLICATION, LocalFleet
from tests.campaigns.checks import check_main, is_whole, serve_config
from tests.support.fleet.memory_watch import MemoryWatch

MODEL = "overloaded"
_CALIBRATION = 64
"""Number of requests for measuring capacity, from as many clients as can run concurrently."""
_SETTLE_S = 15.0
"""Seconds of overload before memory is sampled, during which buffers and caches fill."""
_WINDOW_S = 10.0
"""Length in seconds of the windows at the start and the end whose means are compared."""
_MOST_GROWTH = 0.03


@dataclass(frozen=True, kw_only=True, slots=True)
class OverloadOptions:
    """Load and its duration."""

    model: str | None = None
    """Checkpoint folder; default: the demo model."""
    duration_s: float = 60.0
    """Seconds of overload in which memory is measured, after a warm-up."""
    factor: float = 10.0
    """Offered load relative to the measured capacity."""
    max_num_seqs: int = 8
    """Maximum running requests."""
    max_queued_requests: int = 32
    """Maximum waiting requests."""
    output_len: int = 256
    """Tokens per request: enough that clients can offer `factor` times the capacity."""
    seed: int = 0
    """Seed of the arrivals."""

    def __post_init__(self) -> None:
        if self.duration_s < 2 * _WINDOW_S:
            raise ValueError(f"--duration-s must be at least {2 * _WINDOW_S:g}")
        if self.factor <= 1:
            raise ValueError("--factor must be above 1")


def run_overload(options: OverloadOptions) -> Result:
    """Starts a fleet with one worker, measures its capacity, and offers `factor` times as much."""
    config = serve_config(
        MODEL,
        options.model,
        max_num_seqs=options.max_num_seqs,
        max_queued_requests=options.max_queued_requests,
        kv_cache_tokens=8192,
    )
    replica = f"ray::ServeReplica:{APPLICATION}:"
    parts = {
        "gateway": (f"{replica}gateway",),
        "front": (replica + config.models[0].deployment,),
        "scheduler": ("ray::Rank0",),
    }
    with LocalFleet(config, report=note) as fleet:
        url = f"{fleet.base_url}/v1/completions"
        requests = _requests(options, 2 * _CALIBRATION, [0.0] * 2 * _CALIBRATION)
        for half in (requests[:_CALIBRATION], requests[_CALIBRATION:]):  # the first one warms up
            calm = run_load(_load(url, half, options.max_num_seqs), 1)
        if any(record.error for record in calm.records):
            raise RuntimeError(f"a request failed without load: {calm.records[0].error}")
        capacity = _CALIBRATION / calm.duration_s
        rate = options.factor * capacity
        note(f"capacity {capacity:.1f} requests/s; offering {rate:.0f}")
        count = round(rate * (_SETTLE_S + options.duration_s))
        times = arrival_times(count, rate, 1.0, options.seed)
        with MemoryWatch(parts) as memory:
            load = run_load(_load(url, _requests(options, count, times), None), 1)
    return _result(options, capacity, load, memory)


def _requests(options: OverloadOptions, count: int, times: Sequence[float]) -> list[Request]:
    """Requests with unique prompts, so that none is cached, and with full-length responses."""
    return [
        completion_request(
            *(index, MODEL, f"{index} of {count}: tell me a story", options.output_len),
            arrival_s=at,
        )
        for index, at in enumerate(times)
    ]


def _load(url: str, requests: Sequence[Request], max_concurrency: int | None) -> Load:
    return Load(url=url, headers={}, requests=tuple(requests), max_concurrency=max_concurrency)


def judge(
    records: Sequence[Record], growth: Mapping[str, float], options: OverloadOptions
) -> list[Check]:
    """Checks of the responses and of memory growth (relative, by part)."""
    admitted = [record for record in records if record.status == 200]
    refused = [record for record in records if record.status == 429]
    num_served = sum(map(is_whole, admitted))
    silent = sum(not r.retry_after.isdigit() or int(r.retry_after) < 1 for r in refused)
    others = len(records) - len(admitted) - len(refused)
    return [
        at_least("offered_over_served", len(records) / max(num_served, 1), "x", options.factor),
        at_least("served", num_served, "requests", 1),
        exactly("refused_without_retry_after", silent, "requests", 0),
        exactly("neither_served_nor_429", others, "requests", 0),
        exactly("admitted_unfinished", len(admitted) - num_served, "requests", 0),
        *(at_most(f"{part}_memory_growth", growth[part], "share", _MOST_GROWTH) for part in growth),
    ]


def _result(
    options: OverloadOptions, capacity: float, load: LoadResult, memory: MemoryWatch
) -> Result:
    records = load.records
    end = _SETTLE_S + options.duration_s
    before = memory.mean_mib(_SETTLE_S, _SETTLE_S + _WINDOW_S)
    after = memory.mean_mib(end - _WINDOW_S, end)
    growth = {name: after[name] / before[name] - 1.0 for name in before}
    num_served = sum(map(is_whole, records))
    sent_s = max(record.start for record in records) - min(record.start for record in records)
    failures = [record.error for record in records if record.error and record.status != 429]
    return {
        "capacity_rps": capacity,
        "offered_rps": len(records) / sent_s,
        "served_rps": num_served / load.duration_s,
        "num_requests": len(records),
        "num_served": num_served,
        "num_refused": sum(record.status == 429 for record in records),
        "memory_before_mib": before,
        "memory_after_mib": after,
        "first_failures": failures[:5],
        "checks": checks_json(judge(records, growth, options)),
    }


if __name__ == "__main__":
    sys.exit(check_main(run_overload, OverloadOptions))
