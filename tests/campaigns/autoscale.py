"""`make check-autoscale`: autoscaling under a load step and ten minutes of noisy load."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import uvloop

from cluster.autoscaling.config import AutoscalingConfig
from cluster.bench.arrivals import phased_arrival_times
from cluster.bench.client import Record, completion_request
from cluster.bench.load import Load, drive
from cluster.bench.report import Check, Result, at_least, at_most, checks_json, exactly, note
from cluster.bench.stats import percentile
from cluster.config import ServeConfig
from cluster.launch import LocalFleet
from deploy.benchmarks.routing.paced import run_paced
from deploy.benchmarks.routing.workload import DEFAULT_COSTS, FleetShape
from tests.campaigns.checks import check_main, is_whole, serve_config

MODEL = "paced"
_NOISE_MINUTES = 10.0
_PROMPT = "{}: the ferry leaves the old harbour at seven, and the baker's cart is on the quay."
MOST_WORKERS = 3
OUTPUT = 32
"""Output tokens per request."""
PROMPT_LEN = 48
"""Approximate prompt tokens per request."""
_SEGMENT_S = 5.0
_SWELL = 0.35
_JITTER = 0.3
_SWELL_S = 60.0
_READY = re.compile(r'^rayfleet_workers{[^}]*state="ready"[^}]*} (\S+)$', re.MULTILINE)
_INTERVAL_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoscaleOptions:
    """A load step followed by noisy load. Workers are paced, so capacity does not depend on the
    machine."""

    model: str | None = None
    """Folder with a tokenizer; default: the demo model."""
    pace: float = 8.0
    """Step time as a multiple of the step time of a 70B model on data-center GPUs. Steps are
    planned by the real scheduler but compute nothing."""
    num_gateways: int = 2
    """Number of gateways; each reports its part of the load."""
    low_s: float = 30.0
    """Seconds of load for one worker before the step up."""
    high_s: float = 60.0
    """Seconds of load for three workers."""
    after_s: float = 200.0
    """Seconds of load for one worker after the step down."""
    noise_s: float = 600.0
    """Seconds of noisy load, which varies around the threshold between one and two workers."""
    downscale_delay_s: float = 60.0
    """Same as in `rayfleet serve`."""
    seed: int = 0
    """Seed of arrivals and noise."""

    def __post_init__(self) -> None:
        for name in ("pace", "low_s", "high_s", "after_s", "noise_s", "downscale_delay_s"):
            if getattr(self, name) <= 0.0:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} must be greater than 0, got {getattr(self, name)}")

    @property
    def shape(self) -> FleetShape:
        """Shape of a paced worker."""
        return FleetShape(costs=DEFAULT_COSTS, num_pages=1500, max_num_seqs=32)

    @property
    def autoscaling(self) -> AutoscalingConfig:
        """Autoscaling configuration of the model."""
        return AutoscalingConfig(
            max_workers=MOST_WORKERS, downscale_delay_s=self.downscale_delay_s, upscale_delay_s=2.0
        )

    @property
    def worker_rate(self) -> float:
        """Requests per second that keep one worker at its target utilization."""
        costs, places = self.shape.costs, self.shape.max_num_seqs
        token_s = costs.decode(places, places * (PROMPT_LEN + OUTPUT / 2)) / places
        request_s = (costs.prefill(PROMPT_LEN) + OUTPUT * token_s) * self.pace
        return self.autoscaling.target_load / request_s

    def step_times(self) -> list[float]:
        """Arrival times of the load step."""
        low, high = 0.4 * self.worker_rate, 2.5 * self.worker_rate
        phases = [(self.low_s, low), (self.high_s, high), (self.after_s, low)]
        return phased_arrival_times(phases, self.seed)

    def noise_times(self) -> list[float]:
        """Arrival times of the noisy load. The rate varies randomly every five seconds, on top of
        slower variation over about a minute; arrivals within the five seconds are Poisson."""
        random = np.random.default_rng(self.seed)
        count = max(1, round(self.noise_s / _SEGMENT_S))
        width = round(_SWELL_S / _SEGMENT_S)
        swell = np.convolve(random.normal(0.0, 1.0, count + width - 1), np.ones(width), "valid")
        swell *= _SWELL / np.sqrt(width)
        jitter = random.normal(0.0, _JITTER, count)
        rates = 1.4 * self.worker_rate * np.exp(swell + jitter)
        phases = [(self.noise_s / count, float(rate)) for rate in rates]
        return phased_arrival_times(phases, self.seed + 1)


class Count(NamedTuple):
    """Number of ready workers at one point in time."""

    at_s: float
    """Seconds since the start of the load."""
    workers: int


class WorkerWatch:
    """Samples the number of ready workers until cancelled."""

    def __init__(self, base_url: str) -> None:
        self.counts: list[Count] = []
        self._url = f"{base_url}/metrics"

    async def run(self, start: float) -> None:
        """Starts sampling; `start` is on the clock of `time.perf_counter`."""
        async with aiohttp.ClientSession() as session:
            while True:
                async with session.get(self._url) as response:
                    text = await response.text()
                at_s = time.perf_counter() - start
                # Counts workers that all gateways report.
                workers = int(min(map(float, _READY.findall(text)), default=0.0))
                if not self.counts or self.counts[-1].workers != workers:
                    note(f"{at_s:6.1f} s  {workers} worker(s)")
                self.counts.append(Count(at_s, workers))
                await asyncio.sleep(_INTERVAL_S)


def levels(counts: Sequence[Count]) -> list[int]:
    """Sequence of worker counts, without consecutive duplicates."""
    return [workers for workers, _ in groupby(count.workers for count in counts)]


def num_turns(counts: Sequence[Count]) -> int:
    """Number of reversals: changes in the direction opposite to the previous change."""
    rises = [later > earlier for earlier, later in pairwise(levels(counts))]
    return sum(a != b for a, b in pairwise(rises))


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """Result of one load."""

    records: Sequence[Record]
    counts: Sequence[Count]

    @property
    def num_failed(self) -> int:
        """Number of requests that did not receive all of their tokens."""
        return sum(not is_whole(record) for record in self.records)

    def result(self) -> Result:
        """Metrics for the report."""
        ttfts = [record.ttft for record in self.records if not record.error]
        return {
            "num_requests": len(self.records),
            "num_failed": self.num_failed,
            "workers": levels(self.counts),
            "direction_changes": num_turns(self.counts),
            "ttft_p50_s": percentile(ttfts, 50.0),
            "ttft_p99_s": percentile(ttfts, 99.0),
            "first_failures": [r.error or f"HTTP {r.status}" for r in self.records if r.error][:5],
        }


def run_autoscale(options: AutoscaleOptions) -> Result:
    """Starts a fleet with one worker and runs the load step, then the noise."""
    config = serve_config(
        MODEL,
        options.model,
        endpoint={"num_gateways": options.num_gateways},
        max_num_seqs=options.shape.max_num_seqs,
    )
    [spec] = config.models
    config = replace(config, models=(replace(spec, autoscaling=options.autoscaling),))

    def build(config: ServeConfig) -> Any:
        # Imported here, because Ray reads its environment on import.
        from deploy.benchmarks.routing.paced_group import build_paced

        return build_paced(config, partial(run_paced, options.shape, options.pace))

    with LocalFleet(config, report=note, build=build) as fleet:
        note("a load step")
        step = uvloop.run(_phase(fleet.base_url, options.step_times()))
        note("noise")
        noise = uvloop.run(_phase(fleet.base_url, options.noise_times()))
    return {
        "worker_rate_rps": options.worker_rate,
        "noise_minutes": options.noise_s / 60.0,
        "step": step.result(),
        "noise": noise.result(),
        "checks": checks_json(judge(options, step, noise)),
    }


def judge(options: AutoscaleOptions, step: Phase, noise: Phase) -> list[Check]:
    """Checks that the fleet scales from one worker to three and back to one without failed
    requests, and that noise causes at most one reversal."""
    return [
        exactly("failed_requests", step.num_failed + noise.num_failed, "requests", 0),
        exactly("workers_before_step", _workers_at(step, options.low_s), "workers", 1),
        exactly("workers_in_step", _most(step), "workers", MOST_WORKERS),
        exactly("workers_after_step", step.counts[-1].workers, "workers", 1),
        exactly("step_direction_changes", num_turns(step.counts), "changes", 1),
        at_most("noise_direction_changes", num_turns(noise.counts), "changes", 1),
        at_least("noise_minutes", options.noise_s / 60.0, "min", _NOISE_MINUTES),
    ]


def _workers_at(phase: Phase, at_s: float) -> int:
    """Maximum number of workers before this time."""
    return max((count.workers for count in phase.counts if count.at_s < at_s), default=0)


def _most(phase: Phase) -> int:
    return max(count.workers for count in phase.counts)


async def _phase(base_url: str, times: Sequence[float]) -> Phase:
    watch = WorkerWatch(base_url)
    start = time.perf_counter()
    watching = asyncio.create_task(watch.run(start))
    load = Load(
        url=f"{base_url}/v1/completions",
        headers={},
        requests=tuple(
            completion_request(index, MODEL, _PROMPT.format(index), OUTPUT, arrival_s=at)
            for index, at in enumerate(times)
        ),
        max_concurrency=None,
    )
    try:
        records = await drive(load, start)
        if watching.done():
            watching.result()  # raises the error that ended the task
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    return Phase(records=records, counts=watch.counts)


if __name__ == "__main__":
    sys.exit(check_main(run_autoscale, AutoscaleOptions))
