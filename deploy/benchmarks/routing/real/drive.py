"""Load of `router --real`, and the outcomes of its requests."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from cluster.bench.client import Record, completion_request
from cluster.bench.load import Load, drive
from cluster.bench.serve import COMPLETIONS
from deploy.benchmarks.routing.real.traffic import OUTPUT, Planned


class Sent(msgspec.Struct, frozen=True):
    """Outcome of a request."""

    workload: str
    ttft_s: float
    num_prompt: int
    """Number of prompt tokens."""
    num_cached: int
    """Number of prompt tokens that were cached on the worker."""
    measured: bool
    """Whether metrics include this request."""
    error: str = ""
    """Error message if the request failed; empty if it succeeded."""


async def send_all(base_url: str, workload: str, planned: Sequence[Planned]) -> list[Sent]:
    """Sends all requests of a workload; returns their outcomes in the order of `planned`."""
    numbers = {plan.name: number for number, plan in enumerate(planned)}
    load = Load(
        url=base_url + COMPLETIONS,
        headers={},
        requests=tuple(
            completion_request(
                *(number, "paced", plan.prompt, OUTPUT),
                arrival_s=plan.at,
                after=numbers.get(plan.after),
            )
            for number, plan in enumerate(planned)
        ),
        max_concurrency=None,
    )
    records = await drive(load, time.perf_counter())
    return [_sent(workload, *pair) for pair in zip(planned, records, strict=True)]


def _sent(workload: str, plan: Planned, record: Record) -> Sent:
    error = record.error
    if not error and record.output_len != OUTPUT:
        error = f"{record.output_len} tokens instead of {OUTPUT}"
    return Sent(
        workload, record.ttft, record.prompt_len, record.cached_tokens, plan.measured, error
    )
