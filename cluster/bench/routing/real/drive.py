"""Sends traffic to an endpoint, each request at its time or after the one that it waits for."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence

import msgspec

from cluster.bench.client import Record, Request, open_session, send
from cluster.bench.routing.real.traffic import OUTPUT, Planned

_PATH = "/v1/completions"


class Sent(msgspec.Struct, frozen=True):
    """What became of a request."""

    workload: str
    ttft_s: float
    num_prompt: int
    num_cached: int
    measured: bool
    error: str = ""


async def drive(base_url: str, workload: str, planned: Sequence[Planned]) -> list[Sent]:
    """Sends all and waits for the last stream's end; outcomes in the order of `planned`."""
    ended = {one.name: asyncio.Event() for one in planned}
    start = time.perf_counter()
    async with open_session({}) as session:

        async def one(number: int, plan: Planned) -> Sent:
            if plan.after:
                await ended[plan.after].wait()
                await asyncio.sleep(plan.at)
            else:
                await asyncio.sleep(start + plan.at - time.perf_counter())
            try:
                record = await send(session, base_url + _PATH, _request(number, plan))
            finally:
                ended[plan.name].set()
            return _sent(workload, plan, record)

        return await asyncio.gather(*(one(n, plan) for n, plan in enumerate(planned)))


def _request(number: int, plan: Planned) -> Request:
    body = {
        "model": "paced",
        "prompt": plan.prompt,
        "max_tokens": OUTPUT,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return Request(index=number, body=json.dumps(body).encode(), prompt_len=0, output_len=OUTPUT)


def _sent(workload: str, plan: Planned, record: Record) -> Sent:
    error = record.error
    if not error and record.output_len != OUTPUT:
        error = f"{record.output_len} tokens instead of {OUTPUT}"
    return Sent(
        workload, record.ttft, record.prompt_len, record.cached_tokens, plan.measured, error
    )
