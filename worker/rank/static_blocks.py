"""A pass over blocks as a function of buffers that never move: what a CUDA graph captures.

Every row is one block. A row of a Plan that computes several, such as a block to commit and the one
that follows it, is as many rows here: all keys of a layer are stored before any query of it reads
them, and within the pass a block reads what the blocks before it have just stored, as it does in
one row. So any pass of few enough blocks has this form, (blocks x positions of a block).

A pass of fewer blocks is padded with the first block of the tables' dummy slot, whose pages are the
dummy page.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kernels import gather_step_inputs, prepare_extend
from worker.models.context import ForwardContext, KVCache
from worker.models.decoder import DecoderModel
from worker.plan.plan import Row
from worker.rank.static_step import StaticInputs
from worker.rank.tables import DeviceTables, IntArray


class StaticBlocks:
    """The buffers, and the pass over their leading blocks.

    Args:
        model: loaded.
        kv_caches: of all layers.
        tables: tokens and pages of all slots.
        max_rows: blocks of the largest pass.
        batch_invariant: whether attention splits rows at fixed places.
    """

    def __init__(
        self,
        model: DecoderModel,
        kv_caches: tuple[KVCache, ...],
        tables: DeviceTables,
        *,
        max_rows: int,
        batch_invariant: bool,
    ) -> None:
        self._model = model
        self._kv_caches = kv_caches
        self._tables = tables
        self._batch_invariant = batch_invariant
        self.block_size = tables.block_size
        device = tables.token_pool.device
        # Zeros are the first slot's first block: harmless to capture on empty tables.
        self._columns = torch.zeros(2, max_rows, dtype=torch.int64, device=device)
        """Slots and first positions."""
        self._query_start = torch.arange(max_rows + 1, device=device) * tables.block_size
        self._query_start_int = self._query_start.int()
        self.hidden = torch.zeros(
            max_rows * tables.block_size,
            model.config.hidden_size,
            dtype=model.options.dtype,
            device=device,
        )

    def load(self, staged: torch.Tensor) -> None:
        """Takes over columns that `fill_blocks` made; int64 [2 * size] on the device."""
        columns = staged.view(2, -1)
        self._columns[:, : columns.shape[1]].copy_(columns)

    def forward(self, size: int) -> None:
        """Hidden states of the columns' blocks, `size` of them."""
        tables, block_size = self._tables, self.block_size
        step = gather_step_inputs(
            tables.token_pool,
            tables.page_table,
            self._columns[0, :size],
            self._columns[1, :size],
            self._query_start[: size + 1],
            num_tokens=size * block_size,
            longest_query=block_size,
            num_pages=tables.page_table.shape[1],
            page_size=tables.page_size,
        )
        extend = prepare_extend(
            step.page_rows,
            step.seq_lens,
            self._query_start_int[: size + 1],
            seq_lens_host=[tables.page_table.shape[1] * tables.page_size] * size,
            query_lens_host=[block_size] * size,
            page_size=tables.page_size,
            batch_invariant=self._batch_invariant,
            block_size=block_size,
        )
        context = ForwardContext(
            kv_caches=self._kv_caches,
            slot_mapping=step.slot_mapping,
            num_decode_tokens=0,
            decode=None,
            extend=extend,
        )
        hidden = self._model.forward(step.input_ids, step.positions, context)
        self.hidden[: size * block_size].copy_(hidden)


def num_blocks(rows: Sequence[Row], block_size: int) -> int:
    """Blocks that a Plan's rows compute."""
    return sum(row.length for row in rows) // block_size


def fill_blocks(
    rows: Sequence[Row], tables: DeviceTables, size: int
) -> tuple[IntArray, StaticInputs]:
    """The columns [2 * size] of a pass over these rows' blocks, padded to `size` of them."""
    block_size = tables.block_size
    columns = np.zeros((2, size), dtype=np.int64)
    columns[0] = tables.token_pool.shape[0] - 1
    place = 0
    for row in rows:
        count = row.length // block_size
        columns[0, place : place + count] = row.slot
        columns[1, place : place + count] = row.start + block_size * np.arange(count)
        place += count
    inputs = StaticInputs(size=size, num_rows=place, samples=None, filters=False)
    return columns.reshape(-1), inputs
