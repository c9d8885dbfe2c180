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
    first_s: float
    drain_s: float
    step_s: float
    row_s: float
    chunk: int
    piece: float
    stretch: float


def price_load(load: LoadSnapshot, info: EngineInfo, costs: StepCosts, factor: float) -> Price:
    """What a report's work costs on a worker whose times are `factor` times those of `costs`."""
    chunk = info.max_num_batched_tokens or _CHUNK
    rows = load.num_running
    shape = load.step_shape
    context = shape.decode_context * rows / shape.decode_rows if shape.decode_rows else 0.0
    step = costs.decode(rows, context)
    waiting = max(load.num_queued_tokens - load.queued_cached_tokens, 0)
    under_way = max(load.queued_prefill_tokens - load.num_queued_tokens, 0)
    reserved = load.reserved_prefill_tokens
    piece = load.new_prompt_share * chunk
    queue = first = 0.0
    if tokens := waiting + under_way + reserved:
        queue = costs.prefill_token * under_way + costs.attended * load.prefilling_attended
        queue += _prefill_s(waiting, load.num_waiting, load.queued_cached_tokens, costs)
        queue += _prefill_s(reserved, load.num_reserved, 0, costs)
        queue += -(-tokens // chunk) * step
        pieces = min(waiting, load.num_waiting * piece) + min(reserved, load.num_reserved * piece)
        first = pieces / tokens * queue
    elif rows:
        queue = 0.5 * step  # the one that runs
    drain = costs.prefill(min(tokens, chunk)) + step
    row = costs.decode_row + (costs.context_token * context / rows if rows else 0.0)
    return Price(
        queue_s=queue * factor,
        first_s=first * factor,
        drain_s=drain * factor,
        step_s=step * factor,
        row_s=row * factor,
        chunk=chunk,
        piece=piece,
        stretch=chunk / piece if piece else 1.0,
    )


def _prefill_s(tokens: int, requests: int, cached: int, costs: StepCosts) -> float:
    """To compute so many tokens of so many prompts, after so many that are there already."""
    count = max(requests, 1)
    return count * costs.prefill(tokens / count, cached / count)
