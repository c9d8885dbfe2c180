"""Serves, sends both loads, and holds what came of them against what was promised."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import uvloop

from cluster.bench.autoscale.options import MOST_WORKERS, OUTPUT, AutoscaleOptions
from cluster.bench.autoscale.watch import Count, WorkerWatch, levels, num_turns
from cluster.bench.client import Record, Request
from cluster.bench.load import Load, drive
from cluster.bench.report import Check, Result, at_least, at_most, checks_json, exactly, note
from cluster.bench.stats import percentile
from cluster.config import EndpointConfig, FleetConfig, ModelSpec, ServeConfig, find_demo_model
from cluster.launch import LocalFleet
from cluster.ports import free_ports
from worker.config import EngineConfig

MODEL = "paced"
_NOISE_MINUTES = 10.0
_PROMPT = "{}: the ferry leaves the old harbour at seven, and the baker's cart is on the quay."


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """What became of one load."""

    records: Sequence[Record]
    counts: Sequence[Count]

    @property
    def num_failed(self) -> int:
        """Requests without all of their tokens."""
        return sum(bool(r.error) or r.status != 200 or r.output_len != OUTPUT for r in self.records)

    def result(self) -> Result:
        """Its figures."""
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
    """Starts a fleet of one worker, and sends it the load step, then the noise."""
    engine = EngineConfig(
        model=options.model or find_demo_model(),
        device="cpu",
        max_num_seqs=options.shape.max_num_seqs,
    )
    spec = ModelSpec(
        fleet=FleetConfig(served_model_name=MODEL), engine=engine, autoscaling=options.autoscaling
    )
    endpoint = EndpointConfig(port=free_ports(1)[0], num_gateways=options.num_gateways)
    config = ServeConfig(endpoint=endpoint, models=(spec,))

    def build(config: ServeConfig) -> Any:
        from cluster.bench.routing.real.group import build

        return build(config, options)

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
    """One worker, three, one, and nobody who noticed; noise that changes it for good, or not."""
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
    """The most so far."""
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
        requests=tuple(_request(index, at) for index, at in enumerate(times)),
        max_concurrency=None,
    )
    try:
        records = await drive(load, start)
        if watching.done():
            watching.result()  # raises what has ended it
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    return Phase(records=records, counts=watch.counts)


def _request(index: int, at_s: float) -> Request:
    body = {
        "model": MODEL,
        "prompt": _PROMPT.format(index),
        "max_tokens": OUTPUT,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return Request(
        index=index,
        body=json.dumps(body).encode(),
        prompt_len=0,
        output_len=OUTPUT,
        arrival_s=at_s,
    )
