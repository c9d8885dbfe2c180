"""Turns a Plan's rows into the tensors of one step, without work per token in Python."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from kernels import DecodeMetadata, ExtendMetadata, prepare_decode, prepare_extend
from worker.models.context import ForwardContext, KVCache
from worker.plan.plan import Plan
from worker.rank.sampling.rules import StepRules
from worker.rank.sampling.sampler import RandomRows, gather_random_rows
from worker.rank.tables import DeviceTables, IntArray, ragged_ranges
from worker.rank.transfer import to_device


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardInputs:
    """What one step's forward pass computes, on the device."""

    num_decode_tokens: int
    """Leading rows of one token."""
    input_ids: torch.Tensor
    """[T] int32."""
    positions: torch.Tensor
    """[T] int64."""
    slot_mapping: torch.Tensor
    """[T] int64."""
    decode: DecodeMetadata | None
    extend: ExtendMetadata | None

    def context(
        self, kv_caches: tuple[KVCache, ...], read_tokens: torch.Tensor | None
    ) -> ForwardContext:
        """For the model's forward pass; `read_tokens` as in StepInputs."""
        return ForwardContext(
            kv_caches=kv_caches,
            slot_mapping=self.slot_mapping,
            num_decode_tokens=self.num_decode_tokens,
            decode=self.decode,
            extend=self.extend,
            read_tokens=read_tokens,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs:
    """What one step computes and samples."""

    rows: IntArray
    """[R, 4]: the Plan's rows (slot, start, length, how many of its last positions draw), on the
    host."""
    forward: ForwardInputs | None
    """None where the compiled CPU library finds its inputs in the tables by itself."""
    num_samples: int
    sample_tokens: torch.Tensor | None
    """[S] int64, the tokens whose hidden states are scored; None for all T in order."""
    destinations: torch.Tensor
    """[S] int64: cells of the flat token pool that the draws go to."""
    random: RandomRows | None
    """None where every draw is greedy."""
    rules: StepRules | None
    """None where every row is plain."""
    read_tokens: torch.Tensor | None = None
    """[S] int64, ascending: of the step's tokens, those whose hidden states the forward pass is to
    yield; None for all T."""


def drawn_only(inputs: StepInputs, block_size: int) -> StepInputs:
    """The same, where only what is drawn from is read: of prompts, the last position.

    Not where prompt tokens are scored; which positions of a block are read, its state says.
    """
    scores_prompts = inputs.rules is not None and inputs.rules.prompts
    if inputs.sample_tokens is None or scores_prompts or block_size > 1:
        return inputs
    return replace(inputs, read_tokens=inputs.sample_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """A Plan's rows as columns."""

    table: IntArray
    """[R, 4]"""
    slots: IntArray
    starts: IntArray
    lengths: IntArray
    ends: IntArray
    query_ends: IntArray
    """Running sums of the lengths."""
    draw_slots: IntArray
    """[S] by draw: its slot, the position it is for, the token of the step that it follows."""
    draw_ends: IntArray
    draw_tokens: IntArray
    num_decodes: int
    """Leading rows of length 1."""


def build_native_inputs(plan: Plan, tables: DeviceTables) -> StepInputs:
    """The inputs of a Plan that has rows, for a forward pass that reads the tables by itself."""
    rows = _columns(plan)
    destinations = rows.draw_slots * tables.token_stride + rows.draw_ends
    num_samples, num_tokens = len(rows.draw_slots), int(rows.query_ends[-1])
    sample_tokens = None
    if num_samples < num_tokens:
        sample_tokens = torch.from_numpy(rows.draw_tokens)
    inputs = StepInputs(
        rows=rows.table,
        forward=None,
        num_samples=num_samples,
        sample_tokens=sample_tokens,
        destinations=torch.from_numpy(destinations),
        random=gather_random_rows(
            tables.sampling, rows.draw_slots, rows.draw_ends, tables.token_pool.device
        ),
        rules=tables.rules.gather(plan.rows),
    )
    return drawn_only(inputs, tables.block_size)


def build_inputs(plan: Plan, tables: DeviceTables, *, batch_invariant: bool) -> StepInputs:
    """The inputs of a Plan that has rows; the tables have taken its writes already."""
    rows = _columns(plan)
    num_rows, num_tokens = len(rows.slots), int(rows.query_ends[-1])
    only_decodes = rows.num_decodes == num_rows
    if only_decodes:
        positions, token_slots = rows.starts, rows.slots
    else:
        positions = ragged_ranges(rows.starts, rows.lengths)
        token_slots = np.repeat(rows.slots, rows.lengths)
    pieces = (
        token_slots * tables.token_stride + positions,
        positions,
        token_slots * tables.page_stride + positions // tables.page_size,
        positions % tables.page_size,
        rows.slots,
        rows.ends,
        rows.draw_tokens,
        rows.draw_slots * tables.token_stride + rows.draw_ends,
        np.append(0, rows.query_ends[rows.num_decodes :] - rows.num_decodes),
    )
    # One copy to the device, then views of it.
    staged = to_device(torch.from_numpy(np.concatenate(pieces)), tables.token_pool.device)
    (
        token_cells,
        device_positions,
        page_cells,
        offsets,
        row_slots,
        ends,
        sample_tokens,
        destinations,
        query_start,
    ) = torch.split(staged, [len(piece) for piece in pieces])
    pages = tables.flat_pages.index_select(0, page_cells)
    num_samples = len(rows.draw_slots)
    decode, extend = _attention(rows, row_slots, ends.int(), query_start, tables, batch_invariant)
    inputs = StepInputs(
        rows=rows.table,
        forward=ForwardInputs(
            num_decode_tokens=rows.num_decodes,
            input_ids=tables.flat_tokens.index_select(0, token_cells),
            positions=device_positions,
            slot_mapping=offsets.add_(pages, alpha=tables.page_size),
            decode=decode,
            extend=extend,
        ),
        num_samples=num_samples,
        sample_tokens=None if num_samples == num_tokens else sample_tokens,
        destinations=destinations,
        random=gather_random_rows(
            tables.sampling, rows.draw_slots, rows.draw_ends, tables.token_pool.device
        ),
        rules=tables.rules.gather(plan.rows),
    )
    return drawn_only(inputs, tables.block_size)


def plan_table(plan: Plan) -> IntArray:
    """The Plan's rows as an array [R, 4], as in StepInputs."""
    return np.array(
        [(row.slot, row.start, row.length, row.num_draws) for row in plan.rows], dtype=np.int64
    )


def _columns(plan: Plan) -> _Rows:
    table = plan_table(plan)
    slots, starts, lengths, _ = table.T
    query_ends = np.cumsum(lengths)
    draw_slots, draw_ends, draw_tokens = draw_places(table, query_ends)
    return _Rows(
        table=table,
        slots=slots,
        starts=starts,
        lengths=lengths,
        ends=starts + lengths,
        query_ends=query_ends,
        draw_slots=draw_slots,
        draw_ends=draw_ends,
        draw_tokens=draw_tokens,
        num_decodes=count_decodes(lengths),
    )


def count_decodes(lengths: IntArray) -> int:
    """Leading rows of one token; rows with drafts follow, some of which found none."""
    (longer,) = np.nonzero(lengths > 1)
    return int(longer[0]) if len(longer) else len(lengths)


def draw_places(table: IntArray, query_ends: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """By draw of rows [R, 4]: its slot, the position it is for, the step's token it follows."""
    slots, starts, lengths, draws = table.T
    ends = starts + lengths
    (samples,) = np.nonzero(draws)
    if len(samples) == draws.sum():
        return slots[samples], ends[samples], query_ends[samples] - 1
    return (
        np.repeat(slots, draws),
        ragged_ranges(ends - draws + 1, draws),
        ragged_ranges(query_ends - draws, draws),
    )


def _attention(
    rows: _Rows,
    row_slots: torch.Tensor,
    ends: torch.Tensor,
    query_start: torch.Tensor,
    tables: DeviceTables,
    batch_invariant: bool,
) -> tuple[DecodeMetadata | None, ExtendMetadata | None]:
    border, num_rows = rows.num_decodes, len(rows.slots)
    ends_host = rows.ends.tolist()
    decode, extend = None, None
    if border:
        decode = prepare_decode(
            _page_rows(tables, row_slots[:border], max(ends_host[:border])),
            ends[:border],
            seq_lens_host=ends_host[:border],
            page_size=tables.page_size,
            batch_invariant=batch_invariant,
        )
    if border < num_rows:
        extend = prepare_extend(
            _page_rows(tables, row_slots[border:], max(ends_host[border:])),
            ends[border:],
            query_start.int(),
            seq_lens_host=ends_host[border:],
            query_lens_host=rows.lengths[border:].tolist(),
            page_size=tables.page_size,
            batch_invariant=batch_invariant,
            block_size=tables.block_size,
        )
    return decode, extend


def _page_rows(tables: DeviceTables, slots: torch.Tensor, longest: int) -> torch.Tensor:
    columns = -(-longest // tables.page_size)
    return tables.page_table[:, :columns].index_select(0, slots)
