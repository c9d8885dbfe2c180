"""A worker's report in seconds."""

from __future__ import annotations

from typing import NamedTuple

from worker.wire.messages import EngineInfo, LoadSnapshot
from worker.wire.step_time import StepCosts

_CHUNK = 2048
"""Tokens per step where a worker does not tell."""


class Price(NamedTuple):
    """See the fields of WorkerTable with these names."""

    queue_s: float
    drain_s: float
    step_s: float
    row_s: float
    chunk: int


def price_load(load: LoadSnapshot, info: EngineInfo, costs: StepCosts, factor: float) -> Price:
    """What a report's work costs on a worker whose times are `factor` times those of `costs`."""
    chunk = info.max_num_batched_tokens or _CHUNK
    rows = load.num_running
    shape = load.step_shape
    context = shape.decode_context * rows / shape.decode_rows if shape.decode_rows else 0.0
    step = costs.decode(rows, context)
    tokens = max(load.queued_prefill_tokens - load.queued_cached_tokens, 0)
    tokens += load.reserved_prefill_tokens
    queue = 0.0
    if tokens:
        requests = max(load.num_waiting + load.num_reserved, 1)
        cached = load.queued_cached_tokens / requests
        queue = requests * costs.prefill(tokens / requests, cached) + -(-tokens // chunk) * step
    elif rows:
        queue = 0.5 * step  # the one that runs
    drain = costs.prefill(min(tokens, chunk)) + step
    row = costs.decode_row + (costs.context_token * context / rows if rows else 0.0)
    return Price(queue * factor, drain * factor, step * factor, row * factor, chunk)
