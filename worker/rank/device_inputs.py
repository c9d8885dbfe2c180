"""A step's inputs on CUDA: one pinned copy, a launch that writes tables, one that gathers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels import (
    DecodeMetadata,
    ExtendMetadata,
    StepTensors,
    gather_step_inputs,
    prepare_decode,
    prepare_extend,
    write_table_rows_,
)
from kernels.attention import AttentionLibrary
from kernels.sample_tokens import GREEDY_BELOW
from worker.plan.plan import Plan
from worker.rank.inputs import (
    ForwardInputs,
    StepInputs,
    count_decodes,
    draw_places,
    drawn_only,
    plan_table,
)
from worker.rank.sampling.rules import StepRules
from worker.rank.sampling.sampler import RandomRows
from worker.rank.static_blocks import StaticBlocks, fill_blocks
from worker.rank.static_step import StaticInputs, StaticStep, fill_columns
from worker.rank.tables import DeviceTables, IntArray
from worker.rank.transfer import Staging, Uploader, uploader_to

if TYPE_CHECKING:
    from worker.rank.speculation.placement import Placement


def prepare_on_device(
    plan: Plan,
    tables: DeviceTables,
    *,
    batch_invariant: bool,
    library: AttentionLibrary | None = None,
    uploader: Uploader | None = None,
    placement: Placement | None = None,
) -> StepInputs | None:
    """Applies the Plan's writes and makes its inputs; None for a Plan without rows.

    Args:
        plan: the step.
        tables: take its writes.
        batch_invariant: see `prepare_decode`.
        library: see `prepare_decode`.
        uploader: takes to the device what is staged.
        placement: of rows that float.
    """
    staging = Staging()
    writes = _Writes.of(plan, tables, staging)
    step = _Step.of(plan, tables, staging) if plan.rows else None
    staged = staging.send(uploader or uploader_to(tables.token_pool.device))
    writes.apply(tables, staged)
    if step is None:
        return None
    forward = step.forward(tables, staged, batch_invariant, library, placement)
    inputs = step.inputs(staged, forward, tables.rules.gather(plan.rows), placement)
    return drawn_only(inputs, tables.block_size)


def prepare_static(
    plan: Plan, tables: DeviceTables, step: StaticStep, size: int, uploader: Uploader
) -> tuple[StaticInputs, StepInputs | None]:
    """The same for a step of decodes that runs on static buffers, padded to `size` rows.

    Its draw has inputs of its own where rows have rules, which no graph knows.
    """
    staging = Staging()
    writes = _Writes.of(plan, tables, staging)
    rules = tables.rules.gather(plan.rows)
    content, inputs = fill_columns(plan_table(plan), tables, size)
    place = staging.add(content)
    ruled = None if rules is None else _Step.of(plan, tables, staging)
    staged = staging.send(uploader)
    writes.apply(tables, staged)
    step.load(staged[place])
    return inputs, None if ruled is None else ruled.inputs(staged, None, rules)


def prepare_blocks(
    plan: Plan, tables: DeviceTables, step: StaticBlocks, size: int, uploader: Uploader
) -> StaticInputs:
    """The same for a pass over blocks, padded to `size` of them."""
    staging = Staging()
    writes = _Writes.of(plan, tables, staging)
    columns, inputs = fill_blocks(plan.rows, tables, size)
    place = staging.add(columns)
    staged = staging.send(uploader)
    writes.apply(tables, staged)
    step.load(staged[place])
    return inputs


@dataclass(frozen=True, kw_only=True, slots=True)
class _Writes:
    """A Plan's writes to the tables; the first that is staged."""

    longest: int
    """Of a run of cells; 0 without writes."""

    @staticmethod
    def of(plan: Plan, tables: DeviceTables, staging: Staging) -> _Writes:
        writes = tables.stage(plan)
        if writes is None:
            return _Writes(longest=0)
        segments, values = writes
        staging.add(segments.reshape(-1))
        staging.add(values)
        return _Writes(longest=int(segments[:, 3].max()))

    def apply(self, tables: DeviceTables, staged: list[torch.Tensor]) -> None:
        if self.longest:
            segments, values = staged[0].view(-1, 4), staged[1]
            write_table_rows_(
                tables.token_pool, tables.page_table, segments, values, longest=self.longest
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """A Plan's rows as columns on the host, and where each was staged."""

    table: IntArray
    """[R, 4]: slot, start, length, whether it samples."""
    starts: IntArray
    lengths: IntArray
    num_decodes: int
    num_samples: int
    places: dict[str, int]
    max_top_k: int

    @staticmethod
    def of(plan: Plan, tables: DeviceTables, staging: Staging) -> _Step:
        table = plan_table(plan)
        slots, starts, lengths, _ = np.ascontiguousarray(table.T)
        num_decodes = count_decodes(lengths)
        query_start = np.zeros(len(slots) + 1, dtype=np.int64)
        np.cumsum(lengths, out=query_start[1:])
        draw_slots, draw_ends, draw_tokens = draw_places(table, query_start[1:])
        columns = {
            "slots": slots,
            "starts": starts,
            "query_start": query_start,
            "extend_start": (query_start[num_decodes:] - num_decodes).astype(np.int32),
            "sample_tokens": draw_tokens,
            "destinations": draw_slots * tables.token_stride + draw_ends,
        }
        random, max_top_k = _random_columns(tables, draw_slots, draw_ends)
        places = {name: staging.add(column) for name, column in {**columns, **random}.items()}
        return _Step(
            table=table,
            starts=starts,
            lengths=lengths,
            num_decodes=num_decodes,
            num_samples=len(draw_slots),
            places=places,
            max_top_k=max_top_k,
        )

    def forward(
        self,
        tables: DeviceTables,
        staged: list[torch.Tensor],
        batch_invariant: bool,
        library: AttentionLibrary | None,
        placement: Placement | None,
    ) -> ForwardInputs:
        columns = self._columns(staged)
        starts, ends = columns["starts"], (self.starts + self.lengths).tolist()
        if placement is not None:
            starts, ends = placement.starts(starts), placement.last_ends
        step = gather_step_inputs(
            tables.token_pool,
            tables.page_table,
            columns["slots"],
            starts,
            columns["query_start"],
            num_tokens=self.num_tokens,
            longest_query=int(self.lengths.max()),
            num_pages=-(-max(ends) // tables.page_size),
            page_size=tables.page_size,
        )
        decode, extend = self._attention(
            step, columns["extend_start"], ends, tables, batch_invariant, library
        )
        return ForwardInputs(
            num_decode_tokens=self.num_decodes,
            input_ids=step.input_ids,
            positions=step.positions,
            slot_mapping=step.slot_mapping,
            decode=decode,
            extend=extend,
        )

    def inputs(
        self,
        staged: list[torch.Tensor],
        forward: ForwardInputs | None,
        rules: StepRules | None,
        placement: Placement | None = None,
    ) -> StepInputs:
        columns = self._columns(staged)
        if placement is not None:
            columns["destinations"] = placement.destinations(columns["destinations"])
            if "positions" in columns:
                columns["positions"] = placement.draw_positions(columns["positions"])
        draws_all = self.num_samples == self.num_tokens
        return StepInputs(
            rows=self.table,
            forward=forward,
            num_samples=self.num_samples,
            sample_tokens=None if draws_all else columns["sample_tokens"],
            destinations=columns["destinations"],
            random=self._random(columns),
            rules=rules,
        )

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def _columns(self, staged: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: staged[place] for name, place in self.places.items()}

    def _attention(
        self,
        step: StepTensors,
        extend_start: torch.Tensor,
        ends: Sequence[int],
        tables: DeviceTables,
        batch_invariant: bool,
        library: AttentionLibrary | None,
    ) -> tuple[DecodeMetadata | None, ExtendMetadata | None]:
        border, num_rows = self.num_decodes, len(self.lengths)
        decode, extend = None, None
        if border:
            decode = prepare_decode(
                step.page_rows[:border],
                step.seq_lens[:border],
                seq_lens_host=ends[:border],
                page_size=tables.page_size,
                batch_invariant=batch_invariant,
                library=library,
            )
        if border < num_rows:
            extend = prepare_extend(
                step.page_rows[border:],
                step.seq_lens[border:],
                extend_start,
                seq_lens_host=ends[border:],
                query_lens_host=self.lengths[border:].tolist(),
                page_size=tables.page_size,
                batch_invariant=batch_invariant,
                library=library,
                block_size=tables.block_size,
            )
        return decode, extend

    def _random(self, columns: dict[str, torch.Tensor]) -> RandomRows | None:
        if "temperature" not in columns:
            return None
        return RandomRows(
            rows=None,
            seeds=columns["seeds"],
            positions=columns["positions"],
            temperature=columns["temperature"],
            top_k=columns.get("top_k"),
            max_top_k=self.max_top_k,
            top_p=columns.get("top_p"),
            log_min_p=columns.get("log_min_p"),
        )


def _random_columns(
    tables: DeviceTables, slots: IntArray, positions: IntArray
) -> tuple[dict[str, np.ndarray], int]:
    """Parameters of all sampling rows and the largest top-k; none where all rows are greedy."""
    sampling = tables.sampling
    temperature = sampling.temperature[slots]
    if not (temperature >= GREEDY_BELOW).any():
        return {}, 0
    columns: dict[str, np.ndarray] = {
        "temperature": temperature,
        "seeds": sampling.seed[slots],
        "positions": positions,
    }
    top_k, top_p = sampling.top_k[slots], sampling.top_p[slots]
    log_min_p = sampling.log_min_p[slots]
    if top_k.any():
        columns["top_k"] = top_k
    if (top_p < 1.0).any():
        columns["top_p"] = top_p
    if (log_min_p > -np.inf).any():
        columns["log_min_p"] = log_min_p
    return columns, int(top_k.max())
