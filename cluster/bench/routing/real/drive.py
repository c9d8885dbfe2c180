"""The traffic of `bench router --real` as a load, and what became of its requests."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence

import msgspec

from cluster.bench.client import Record, Request
from cluster.bench.load import Load, drive
from cluster.bench.routing.real.traffic import OUTPUT, Planned
from cluster.bench.serve import COMPLETIONS


class Sent(msgspec.Struct, frozen=True):
    """What became of a request."""

    workload: str
    ttft_s: float
    num_prompt: int
    num_cached: int
    measured: bool
    error: str = ""


async def send_all(base_url: str, workload: str, planned: Sequence[Planned]) -> list[Sent]:
    """Sends all and waits for the last stream's end; outcomes in the order of `planned`."""
    numbers = {plan.name: number for number, plan in enumerate(planned)}
    load = Load(
        url=base_url + COMPLETIONS,
        headers={},
        requests=tuple(_request(plan, numbers) for plan in planned),
        max_concurrency=None,
    )
    records = await drive(load, time.perf_counter())
    return [_sent(workload, *pair) for pair in zip(planned, records, strict=True)]


def _request(plan: Planned, numbers: Mapping[str, int]) -> Request:
    body = {
        "model": "paced",
        "prompt": plan.prompt,
        "max_tokens": OUTPUT,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return Request(
        index=numbers[plan.name],
        body=json.dumps(body).encode(),
        prompt_len=0,
        output_len=OUTPUT,
        arrival_s=plan.at,
        after=numbers.get(plan.after),
    )


def _sent(workload: str, plan: Planned, record: Record) -> Sent:
    error = record.error
    if not error and record.output_len != OUTPUT:
        error = f"{record.output_len} tokens instead of {OUTPUT}"
    return Sent(
        workload, record.ttft, record.prompt_len, record.cached_tokens, plan.measured, error
    )
