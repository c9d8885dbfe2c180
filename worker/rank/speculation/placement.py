"""The placement of a step's speculative rows, where the device alone knows it.

    planned    start ──────── where its newest token may stand ──────── end
    computed                  first ── newest ── drafts ── first + length

`first` is the newest token's position, or further left where the window ends too soon for the
row's length: what stands before the newest token is then computed once more, to no effect.
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
class Placement:
    """Positions of F speculative rows, which make D draws in all."""

    tables: DeviceTables
    rows: torch.Tensor
    """[F] int64: which rows of the step they are."""
    slots: torch.Tensor
    """[F] int64."""
    newest: torch.Tensor
    """[F] int64: positions of the newest tokens."""
    firsts: torch.Tensor
    """[F] int64: first positions that are computed."""
    shifts: torch.Tensor
    """[F] int64: how far these are from where the rows were planned."""
    lengths: torch.Tensor
    """[F] int64: positions that are computed."""
    longest: int
    """The largest of `lengths`, on the host."""
    last_ends: Sequence[int]
    """Ends of the step's rows, on the host: no position from there on is computed."""
    draws: torch.Tensor
    """[D] int64: which draws of the step are theirs."""
    draw_rows: torch.Tensor
    """[D] int64: in which of the F rows each is."""
    draw_offsets: torch.Tensor
    """[D] int64: at which of its positions."""

    @classmethod
    def of(
        cls,
        plan: Plan,
        rows: Sequence[Row],
        draws: IntArray,
        newest: torch.Tensor,
        tables: DeviceTables,
    ) -> Self:
        """Puts each row where its newest token stands, or as far left as its window demands.

        Args:
            plan: with the windows.
            rows: the Plan's, of the lengths that are computed.
            draws: [F, M], as in DeviceRows.
            newest: by slot: position of its newest token, unless its row starts behind that.
            tables: of the rank.
        """
        windows = [
            (number, row.slot, row.start, row.start + row.length, rows[number].length)
            for number, row in enumerate(plan.rows)
            if isinstance(row, DraftRow)
        ]
        # Kernels take contiguous columns.
        table = np.ascontiguousarray(np.array(windows, dtype=np.int64).T)
        draw_rows, draw_offsets = np.nonzero(np.arange(draws.shape[1]) < table[4][:, None])
        flat = np.stack((draws[draw_rows, draw_offsets], draw_rows, draw_offsets))
        device = tables.token_pool.device
        numbers, slots, starts, ends, lengths = to_device(torch.from_numpy(table), device).unbind()
        own, own_rows, own_offsets = to_device(torch.from_numpy(flat), device).unbind()
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
            longest=draws.shape[1],
            last_ends=[row.start + row.length for row in plan.rows],
            draws=own,
            draw_rows=own_rows,
            draw_offsets=own_offsets,
        )

    def write(self, drafts: torch.Tensor) -> None:
        """Puts int32 drafts [F, longest - 1] behind the newest tokens, as far as rows reach."""
        ahead = torch.arange(1, self.longest, device=drafts.device)
        positions = self.newest[:, None] + ahead
        is_inside = positions < (self.firsts + self.lengths)[:, None]
        cells = torch.where(is_inside, self._cells(positions), self._nowhere)
        self.tables.flat_tokens.index_copy_(0, cells.view(-1), drafts.view(-1))

    def expected(self) -> torch.Tensor:
        """Tokens that the token rows should hold behind each computed position, as in
        DeviceRows."""
        columns = torch.arange(self.longest, device=self.slots.device)
        is_inside = columns + 1 < self.lengths[:, None]
        cells = self._cells(self.firsts[:, None] + 1 + columns)
        tokens = self.tables.flat_tokens[torch.where(is_inside, cells, self._nowhere)]
        return torch.where(is_inside, tokens, NO_TOKEN)

    def starts(self, planned: torch.Tensor) -> torch.Tensor:
        """First positions of all rows of the step, from the planned ones."""
        return planned.index_add(0, self.rows, self.shifts)

    def destinations(self, planned: torch.Tensor) -> torch.Tensor:
        """Cells that all draws go to: those of known tokens nowhere."""
        cells = planned[self.draws] + self.shifts[self.draw_rows]
        is_new = self.firsts[self.draw_rows] + self.draw_offsets >= self.newest[self.draw_rows]
        return planned.index_copy(0, self.draws, torch.where(is_new, cells, self._nowhere))

    def draw_positions(self, planned: torch.Tensor) -> torch.Tensor:
        """Positions that all draws are for."""
        return planned.index_add(0, self.draws, self.shifts[self.draw_rows])

    def _cells(self, positions: torch.Tensor) -> torch.Tensor:
        """Cells of the flat token pool for positions [F, n] of the rows' slots."""
        return self.slots[:, None] * self.tables.token_stride + positions

    @property
    def _nowhere(self) -> int:
        """A cell of the row that belongs to no request."""
        return (len(self.tables.token_pool) - 1) * self.tables.token_stride
