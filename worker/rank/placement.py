"""Positions of speculative rows, which begin at their newest tokens, and of the drafts after them.

    planned    start ──────── window of the newest token ──────── end
    computed                  first ── newest ── drafts ── first + length

If the host knows the positions, a row consists of its newest token and its drafts, so `first` is
the newest token's position. If they are only known on the device, all rows have their planned
length: `first` is an earlier position if the window ends less than this length after the newest
token. Positions before that token are then recomputed, without effect.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from worker.plan.plan import DraftRow, Plan, Row
from worker.rank.tables import DeviceTables
from worker.rank.transfer import IntArray, scatter, to_device

NO_TOKEN = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPlacement:
    """Positions of a step's F speculative rows, computed by the host.

    All fields hold plain integers: with arrays, a step with one row would take 0.1 ms longer on
    CPU.
    """

    slots: Sequence[int]
    """[F]: slots of the rows."""
    newest: Sequence[int]
    """[F]: positions of the newest tokens, which are the first positions that are computed."""
    drafts: Sequence[Sequence[int]]
    """[F]: drafts of each row."""
    first_samples: Sequence[int]
    """[F]: index of each row's first sample among the step's samples."""

    @classmethod
    def of(cls, rows: Sequence[Row], drafts: Sequence[Sequence[int]]) -> Self:
        """Positions of the speculative rows among a step's rows.

        Args:
            rows: all rows of the step.
            drafts: [F]: drafts of each speculative row.
        """
        slots: list[int] = []
        newest: list[int] = []
        first_samples: list[int] = []
        sample = 0
        for row in rows:
            if isinstance(row, DraftRow):
                slots.append(row.slot)
                newest.append(row.start)
                first_samples.append(sample)
            sample += row.num_samples
        return cls(slots=slots, newest=newest, drafts=drafts, first_samples=first_samples)

    def write(self, tables: DeviceTables) -> None:
        """Writes the drafts to the token pool after the newest tokens; does not wait for the
        device."""
        cells: list[int] = []
        for slot, newest, draft in zip(self.slots, self.newest, self.drafts, strict=True):
            first = slot * tables.token_stride + newest + 1
            cells += range(first, first + len(draft))
        if cells:
            scatter(tables.flat_tokens, cells, list(itertools.chain(*self.drafts)))

    def advance(self, newest: torch.Tensor, counts: IntArray | torch.Tensor) -> None:
        """Updates the positions of newest tokens [slots] by the numbers [F] of accepted tokens."""
        positions = [start + n for start, n in zip(self.newest, counts.tolist(), strict=True)]
        scatter(newest, self.slots, positions)


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePlacement:
    """Positions of a step's F speculative rows, computed by the device, with D samples in total."""

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
    """Planned ends of all rows of the step, on the host: upper bounds on the actual ends."""
    samples: torch.Tensor
    """[F, M] int64: index of each position's sample among the step's samples; shorter rows are
    padded with their last sample."""
    flat_samples: torch.Tensor
    """[D] int64: `samples` without padding."""
    sample_rows: torch.Tensor
    """[D] int64: index of each sample's speculative row."""
    sample_offsets: torch.Tensor
    """[D] int64: 0-based position of each sample within its row."""

    @classmethod
    def of(
        cls,
        plan: Plan,
        rows: Sequence[Row],
        newest: torch.Tensor,
        tables: DeviceTables,
    ) -> Self:
        """Positions of rows that begin at their newest tokens, or earlier so that they end within
        their windows; does not wait for the device.

        Args:
            plan: the Plan, whose speculative rows are the windows.
            rows: the Plan's rows, with the lengths that are computed.
            newest: [slots]: positions of the newest tokens; a later window start takes precedence.
            tables: the rank's tables.
        """
        windows = [
            (number, row.slot, row.start, row.start + row.length, rows[number].length)
            for number, row in enumerate(plan.rows)
            if isinstance(row, DraftRow)
        ]
        samples = samples_of_rows(rows)
        # Kernels require contiguous columns.
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
            samples=to_device(torch.from_numpy(samples), device),
            flat_samples=index,
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

    def tokens_after(self) -> torch.Tensor:
        """[F, M]: the token after each computed position in the token pool: a known one or a draft;
        NO_TOKEN at a row's last position and in padding."""
        columns = torch.arange(self.longest, device=self.slots.device)
        is_inside = columns + 1 < self.lengths[:, None]
        cells = self._cells(self.firsts[:, None] + 1 + columns)
        tokens = self.tables.flat_tokens[torch.where(is_inside, cells, self._nowhere)]
        return torch.where(is_inside, tokens, NO_TOKEN)

    def advance(self, newest: torch.Tensor, counts: IntArray | torch.Tensor) -> None:
        """Updates the positions of newest tokens [slots] by the numbers [F] of accepted tokens;
        does not wait for the device."""
        assert isinstance(counts, torch.Tensor), "the device verifies these rows"
        newest.index_copy_(0, self.slots, self.newest + counts)

    def starts(self, planned: torch.Tensor) -> torch.Tensor:
        """First positions [R] of all rows of the step, computed from the planned ones."""
        return planned.index_add(0, self.rows, self.shifts)

    def destinations(self, planned: torch.Tensor) -> torch.Tensor:
        """Cells [S] to which all sampled tokens are written, computed from the planned ones.
        Samples at positions of known tokens go to the dummy slot."""
        cells = planned[self.flat_samples] + self.shifts[self.sample_rows]
        is_new = (
            self.firsts[self.sample_rows] + self.sample_offsets >= self.newest[self.sample_rows]
        )
        return planned.index_copy(0, self.flat_samples, torch.where(is_new, cells, self._nowhere))

    def sample_positions(self, planned: torch.Tensor) -> torch.Tensor:
        """Positions [S] of all sampled tokens, computed from the planned ones."""
        return planned.index_add(0, self.flat_samples, self.shifts[self.sample_rows])

    def _cells(self, positions: torch.Tensor) -> torch.Tensor:
        """Cells [F, n] of the flat token pool, for positions [F, n] of the rows' slots."""
        return self.slots[:, None] * self.tables.token_stride + positions

    @property
    def _nowhere(self) -> int:
        """A cell of the dummy slot, used for positions that must not be accessed."""
        return (len(self.tables.token_pool) - 1) * self.tables.token_stride


def samples_of_rows(rows: Sequence[Row]) -> IntArray:
    """[F, M]: indices of the samples of a step's F speculative rows, as in DevicePlacement.

    Args:
        rows: all rows of the step.
    """
    longest = max(row.length for row in rows if isinstance(row, DraftRow))
    samples: list[list[int]] = []
    sample = 0
    for row in rows:
        if isinstance(row, DraftRow):
            last = sample + row.length - 1
            samples.append([*range(sample, last), *[last] * (longest - row.length + 1)])
        sample += row.num_samples
    return np.array(samples, dtype=np.int64)
