"""Where the floating rows of one step stand, as tensors on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from worker.plan.plan import DraftRow, Row
from worker.rank.tables import DeviceTables
from worker.rank.transfer import to_device

_NO_TOKEN = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """F rows of a step; their draws are D in all."""

    tables: DeviceTables
    rows: torch.Tensor
    """[F]: which rows of the step they are."""
    slots: torch.Tensor
    newest: torch.Tensor
    """[F]: position of the newest token."""
    firsts: torch.Tensor
    """[F]: the first position that is computed."""
    shifts: torch.Tensor
    """[F]: how far this is from where the row was planned."""
    lengths: torch.Tensor
    """[F]: positions that are computed."""
    most_tokens: int
    """The largest of them, on the host."""
    last_ends: Sequence[int]
    """By row of the step, on the host: no position from there on is computed."""
    draws: torch.Tensor
    """[D]: which draws of the step are theirs."""
    draw_rows: torch.Tensor
    """[D]: in which of the F rows each is."""
    draw_offsets: torch.Tensor
    """[D]: at which of its positions."""
    expected: torch.Tensor | None = None
    """[F, most_tokens]: what draws must be for the next one to count."""

    @classmethod
    def of(
        cls,
        tables: DeviceTables,
        rows: Sequence[Row],
        numbers: torch.Tensor,
        slots: torch.Tensor,
        *,
        starts: torch.Tensor,
        ends: torch.Tensor,
        lengths: torch.Tensor,
        newest: torch.Tensor,
        last_ends: Sequence[int],
    ) -> Self:
        """Puts each row where its newest token stands, or as far left as its window demands."""
        floating: list[tuple[int, int, int]] = []
        draw = number = 0
        for row in rows:
            if isinstance(row, DraftRow):
                floating += [(draw + place, number, place) for place in range(row.length)]
                number += 1
            draw += row.num_draws
        columns = to_device(torch.tensor(floating).T.contiguous(), slots.device)
        draws, draw_rows, draw_offsets = columns.unbind()
        firsts = torch.minimum(newest, ends - lengths)
        return cls(
            tables=tables,
            rows=numbers,
            slots=slots,
            newest=newest,
            firsts=firsts,
            shifts=firsts - starts,
            lengths=lengths,
            most_tokens=max(row.length for row in rows if isinstance(row, DraftRow)),
            last_ends=last_ends,
            draws=draws,
            draw_rows=draw_rows,
            draw_offsets=draw_offsets,
        )

    def write(self, drafts: torch.Tensor) -> None:
        """Puts int32 drafts [F, most_tokens - 1] behind the newest tokens, as far as rows reach."""
        ahead = torch.arange(1, self.most_tokens, device=drafts.device)
        positions = self.newest[:, None] + ahead
        cells = self.slots[:, None] * self.tables.token_stride + positions
        is_inside = positions < (self.firsts + self.lengths)[:, None]
        cells = torch.where(is_inside, cells, self._nowhere)
        self.tables.flat_tokens.index_copy_(0, cells.view(-1), drafts.view(-1))

    def expecting(self) -> Self:
        """With what the token row holds now, ahead of the draws."""
        places = torch.arange(self.most_tokens, device=self.slots.device)
        positions = self.firsts[:, None] + 1 + places
        cells = self.slots[:, None] * self.tables.token_stride + positions
        is_inside = places + 1 < self.lengths[:, None]
        tokens = self.tables.flat_tokens[torch.where(is_inside, cells, self._nowhere)]
        return replace(self, expected=torch.where(is_inside, tokens, _NO_TOKEN))

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

    def compare(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of all draws [S]: the first of each row that counts, and how many do, [F] each."""
        assert self.expected is not None, "nothing is expected yet"
        drawn = torch.full_like(self.expected, _NO_TOKEN - 1, dtype=torch.int64)
        drawn[self.draw_rows, self.draw_offsets] = tokens[self.draws]
        offsets = self.newest - self.firsts
        places = torch.arange(self.most_tokens, device=tokens.device)
        goes_on = (drawn == self.expected) | (places < offsets[:, None])
        num_right = goes_on.long().cumprod(dim=1).sum(dim=1) - offsets
        counts = torch.where(offsets < self.lengths, num_right + 1, 0)
        return offsets, counts

    @property
    def _nowhere(self) -> int:
        """A cell of the row that belongs to no request."""
        return (len(self.tables.token_pool) - 1) * self.tables.token_stride
