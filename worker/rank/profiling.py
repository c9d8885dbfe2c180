"""Profile Plans: the largest steps, run at startup to measure peak memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from worker.config import EngineConfig
from worker.plan.plan import Admit, BlockAdmit, BlockRow, LogitsParams, Plan, PlannedRow, Row
from worker.protocol.diffusion import DiffusionParams

PROCESSORS: Final = LogitsParams(
    num_prompt=1,
    frequency_penalty=1.0,
    bias_token_ids=[0],
    biases=[1.0],
    allowed_token_ids=bytes(4),
    num_logprobs=1,
)
"""Logits processors of every kind, and log-probabilities: they allocate all processor tables and a
copy of the raw logits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfilePlans:
    """Steps that only access the dummy page of a cache."""

    plans: tuple[Plan, ...]
    """The largest prefills, then the largest sampling steps."""
    num_tokens: int
    """Number of positions that the cache needs for the longest row and its sampled token."""


def profile_plans(
    config: EngineConfig,
    *,
    max_model_len: int,
    block_size: int,
    canvas_length: int = 0,
    short_row: int = 0,
) -> ProfilePlans:
    """Plans for the engine's largest steps.

    Args:
        config: the engine's configuration, for its limits.
        max_model_len: maximum number of tokens of a request.
        block_size: block size of a block-diffusion model; otherwise 1.
        canvas_length: number of tokens per canvas; 0 for models without canvases.
        short_row: number of tokens up to which prefill rows are computed differently from longer
            ones, which may take more memory; 0 if all rows are computed in the same way.
    """
    max_num_tokens = config.scheduling.max_num_batched_tokens
    slots = range(config.scheduling.max_num_seqs)
    chunk = min(max_num_tokens, max_model_len - 1) // block_size * block_size
    num_chunks = min(len(slots), -(-max_num_tokens // chunk))
    block, known = None, chunk
    if block_size > 1:
        block = BlockAdmit(None, [], max_model_len)
        known = chunk - block_size
        slots = range(min(len(slots), max_num_tokens // block_size))
    if canvas_length:
        block = BlockAdmit(DiffusionParams(steps=1), [], max_model_len)
        slots = range(max(num_chunks, min(len(slots), max_num_tokens // canvas_length)))
    # Random sampling with top-p takes the most memory.
    tokens, adapter = bytes(4 * known), int(config.lora is not None)
    admits = [
        Admit(slot, tokens, 1.0, 0, 0.5, 0.0, slot, block=block, adapter=adapter) for slot in slots
    ]
    # These tables are allocated for the first request with processors and then kept.
    processed = [msgspec.structs.replace(admit, logits_params=PROCESSORS) for admit in admits]
    prefill: list[Row] = [PlannedRow(slot, 0, chunk, 1) for slot in slots[:num_chunks]]
    sampling: list[Row] = [PlannedRow(slot, 0, 1, 1) for slot in slots]
    if block:
        prefill = [BlockRow(slot, 0, chunk) for slot in slots[:num_chunks]]
        sampling = [BlockRow(slot, known, block_size) for slot in slots]
    if canvas_length:
        num_canvases = max_num_tokens // canvas_length
        prefill = [PlannedRow(slot, 0, chunk, 0) for slot in slots[:num_chunks]]
        sampling = [BlockRow(slot, 0, canvas_length) for slot in slots[:num_canvases]]
    prefills = [prefill]
    if 0 < short_row < chunk:
        count = -(-max_num_tokens // short_row)
        prefills.append([PlannedRow(slot, 0, short_row, 1) for slot in slots[:count]])
    samplings = [sampling]
    if num_mixed := canvas_length and max_num_tokens // (2 * canvas_length):
        # Layers hold the inputs of known tokens and canvases twice.
        samplings.append([BlockRow(slot, 0, 2 * canvas_length) for slot in slots[:num_mixed]])
    plans = (
        *(Plan(0, admits, [], rows) for rows in prefills),
        *(Plan(0, processed, [], rows) for rows in samplings),
    )
    return ProfilePlans(plans=plans, num_tokens=max(chunk, 2 * canvas_length) + 1)
