"""The traffic of `bench router --real` as a load, and what became of its requests."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from cluster.bench.client import Record, completion_request
from cluster.bench.load import Load, drive
from cluster.bench.routing.real.traffic import OUTPUT, Planned
from cluster.bench.serve import COMPLETIONS


class Sent(msgspec.Struct, frozen=True):
    """The outcome of a request."""

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
