"""Placement of speculative rows on the device, since their positions are only known there.

    planned    start ──────── window of the newest token ──────── end
    computed                  first ── newest ── drafts ── first + length

`first` is the newest token's position, or an earlier one if the window ends less than the row's
length after it: positions before the newest token are then recomputed, without effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from worker.plan.plan import DraftRow, Plan, Row
from worker.rank.tables import DeviceTables
from worker.rank.transfer import IntArray, to_device

NO_TOKEN = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftPlacement:
    """Positions of a step's F speculative rows, with D samples in total."""

    tables: DeviceTables
    rows: torch.Tensor
    """[F] int64: indices of the speculative rows among the step's rows."""
    slots: torch.Tensor
    """[F] int64: slots of the rows."""
    newest: torch.Tensor
    """[F] int64: positions of the newest tokens."""
    firsts: torch.Tensor
    """[F] int64: first positions that are computed."""
    shifts: torch.Tensor
    """[F] int64: differences between `firsts` and the planned starts."""
    lengths: torch.Tensor
    """[F] int64: number of positions that are computed."""
    longest: int
    """Largest of `lengths`, on the host."""
    last_ends: Sequence[int]
    """Planned ends of all rows of the step, on the host: upper bounds of the computed ones."""
    samples: torch.Tensor
    """[D] int64: indices of the speculative rows' samples among the step's samples."""
    sample_rows: torch.Tensor
    """[D] int64: index of the speculative row of each sample."""
    sample_offsets: torch.Tensor
    """[D] int64: position of each sample within its row, from 0."""

    @classmethod
    def of(
        cls,
        plan: Plan,
        rows: Sequence[Row],
        samples: IntArray,
        newest: torch.Tensor,
        tables: DeviceTables,
    ) -> Self:
        """Places each row at its newest token, or earlier so that it ends within its window.

        Args:
            plan: the Plan, whose speculative rows are the windows.
            rows: the Plan's rows, with the lengths that are computed.
            samples: [F, M]: samples of each row's positions, as in DeviceRows.
            newest: [slots]: positions of the newest tokens; a later start of a window takes
                precedence.
            tables: the rank's tables.
        """
        windows = [
            (number, row.slot, row.start, row.start + row.length, rows[number].length)
            for number, row in enumerate(plan.rows)
            if isinstance(row, DraftRow)
        ]
        # Kernels take contiguous columns.
        table = np.ascontiguousarray(np.array(windows, dtype=np.int64).T)
        sample_rows, sample_offsets = np.nonzero(np.arange(samples.shape[1]) < table[4][:, None])
        flat = np.stack((samples[sample_rows, sample_offsets], sample_rows, sample_offsets))
        device = tables.token_pool.device
        numbers, slots, starts, ends, lengths = to_device(torch.from_numpy(table), device).unbind()
        index, index_rows, index_offsets = to_device(torch.from_numpy(flat), device).unbind()
        positions = newest[slots].maximum(starts)
        firsts = torch.minimum(positions, ends - lengths)
        return cls(
            tables=tables,
            rows=numbers,
            slots=slots,
            newest=positions,
            firsts=firsts,
            shifts=firsts - starts,
            lengths=lengths,
            longest=samples.shape[1],
            last_ends=[row.start + row.length for row in plan.rows],
            samples=index,
            sample_rows=index_rows,
            sample_offsets=index_offsets,
        )

    def write(self, drafts: torch.Tensor) -> None:
        """Writes int32 drafts [F, longest - 1] to the token pool after the newest tokens, up to the
        ends of the rows."""
        ahead = torch.arange(1, self.longest, device=drafts.device)
        positions = self.newest[:, None] + ahead
        is_inside = positions < (self.firsts + self.lengths)[:, None]
        cells = torch.where(is_inside, self._cells(positions), self._nowhere)
        self.tables.flat_tokens.index_copy_(0, cells.view(-1), drafts.view(-1))

    def expected(self) -> torch.Tensor:
        """[F, longest]: the tokens after each computed position in the token pool, as in
        DeviceRows."""
        columns = torch.arange(self.longest, device=self.slots.device)
        is_inside = columns + 1 < self.lengths[:, None]
        cells = self._cells(self.firsts[:, None] + 1 + columns)
        tokens = self.tables.flat_tokens[torch.where(is_inside, cells, self._nowhere)]
        return torch.where(is_inside, tokens, NO_TOKEN)

    def starts(self, planned: torch.Tensor) -> torch.Tensor:
        """First positions [R] of all rows of the step, from the planned ones."""
        return planned.index_add(0, self.rows, self.shifts)

    def destinations(self, planned: torch.Tensor) -> torch.Tensor:
        """Cells [S] that all sampled tokens are written to, from the planned ones; samples at
        positions of known tokens go to the dummy slot."""
        cells = planned[self.samples] + self.shifts[self.sample_rows]
        is_new = (
            self.firsts[self.sample_rows] + self.sample_offsets >= self.newest[self.sample_rows]
        )
        return planned.index_copy(0, self.samples, torch.where(is_new, cells, self._nowhere))

    def sample_positions(self, planned: torch.Tensor) -> torch.Tensor:
        """Positions [S] of all sampled tokens, from the planned ones."""
        return planned.index_add(0, self.samples, self.shifts[self.sample_rows])

    def _cells(self, positions: torch.Tensor) -> torch.Tensor:
        """Cells [F, n] of the flat token pool, for positions [F, n] of the rows' slots."""
        return self.slots[:, None] * self.tables.token_stride + positions

    @property
    def _nowhere(self) -> int:
        """A cell of the dummy slot."""
        return (len(self.tables.token_pool) - 1) * self.tables.token_stride
