"""Prices reports: predicts, by the step-time model, the time that a worker needs for its load."""

from __future__ import annotations

from typing import Generic, NamedTuple

from router.fleet.workers import Floats, Number, WorkerTable
from worker.protocol.messages import EngineInfo, LoadSnapshot
from worker.protocol.step_time import StepCosts


class Work(NamedTuple, Generic[Number]):
    """Amounts of work on a worker: the fields of WorkerTable that start with `work_`."""

    tokens: Number
    attended: Number
    steps: Number
    first_chunks: Number
    burst: Number
    rows: Number
    context: Number


def price_load(
    table: WorkerTable,
    row: int,
    load: LoadSnapshot,
    info: EngineInfo,
    costs: StepCosts,
    factor: float,
) -> None:
    """Stores one worker's report and prices it; step times are `factor` times those of `costs`."""
    chunk = info.max_num_batched_tokens or info.max_model_len
    first_chunk = load.new_prompt_share * chunk
    table.chunk[row] = chunk
    table.first_chunk_tokens[row] = first_chunk
    table.chunk_slowdown[row] = slowdown = chunk / first_chunk if first_chunk else 1.0
    table.extra_slowdown[row] = slowdown - 1.0
    work = work_of(load, chunk)
    for name, value in zip(_WORK, work, strict=True):
        getattr(table, name)[row] = value
    _price(table, row, work, costs, factor)


def price_all(table: WorkerTable, costs: StepCosts, factors: Floats) -> None:
    """Reprices the reports of all workers; `factors` has one entry per row."""
    work = Work(*(getattr(table, name) for name in _WORK))
    _price(table, slice(None), work, costs, factors)
    table.slot_wait_s[:] = table.slot_waits_s(table.num_active)


def work_of(load: LoadSnapshot, chunk: int) -> Work[float]:
    """Amounts of work in a report; `chunk` is the maximum number of prompt tokens per step."""
    rows = load.num_running
    shape = load.step_shape
    context = shape.decode_context * rows / shape.decode_rows if shape.decode_rows else 0.0
    waiting = max(load.num_queued_tokens - load.queued_cached_tokens, 0)
    under_way = max(load.queued_prefill_tokens - load.num_queued_tokens, 0)
    reserved = load.reserved_prefill_tokens
    tokens = waiting + under_way + reserved
    if not tokens:
        half = 0.5 if rows else 0.0  # on average half of the running decode step remains
        return Work(0.0, 0.0, half, 0.0, 0.0, rows, context)
    max_prompt_tokens = load.new_prompt_share * chunk
    first = min(waiting, load.num_waiting * max_prompt_tokens) + min(
        reserved, load.num_reserved * max_prompt_tokens
    )
    attended = (
        load.prefilling_attended
        + _attended(waiting, load.num_waiting, load.queued_cached_tokens)
        + _attended(reserved, load.num_reserved, 0)
    )
    burst = min(tokens, chunk)
    return Work(tokens, attended, -(-tokens // chunk), first / tokens, burst, rows, context)


def _price(
    table: WorkerTable, rows: int | slice, work: Work[Number], costs: StepCosts, factor: Number
) -> None:
    """Stores the predicted times of `work` in the given rows; see the fields of WorkerTable."""
    step = costs.constant + costs.decode_row * work.rows + costs.context_token * work.context
    queue = costs.prefill_token * work.tokens + costs.attended * work.attended + work.steps * step
    burst = work.burst * (costs.prefill_token + 0.5 * costs.attended * work.burst)
    queue_s = queue * factor
    table.set_queue(rows, queue_s, work.first_chunks * queue_s, (burst + step) * factor)
    table.step_s[rows] = step * factor
    table.prefill_token_s[rows] = costs.prefill_token * factor
    table.attended_s[rows] = costs.attended * factor


def _attended(tokens: int, requests: int, cached: int) -> float:
    """Number of (token, attended position) pairs in the remaining prefill of prompts.

    Args:
        tokens: tokens to compute, assumed to be spread evenly over the prompts.
        requests: number of prompts.
        cached: number of tokens that precede `tokens` in their prompts, in total.
    """
    return tokens * (cached + 0.5 * tokens) / max(requests, 1)


_WORK = tuple(f"work_{name}" for name in Work._fields)
