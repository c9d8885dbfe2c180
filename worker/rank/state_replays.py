"""Replay of accepted drafts into the states of requests (`kernels.states.Replay`).

The state of a slot is at the position where its last draft row began, and the inputs of that row
are kept in a ring buffer per slot, with one cell per position. The slot's next row begins at the
position of its newest token. These two positions, which are on the device, determine what is
replayed before it; numbers of accepted drafts are not passed between steps.

A row never begins before the state's position: a step is planned when the results of all but one of
the earlier steps are known, so its window begins after the newest token of the last known step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from kernels import registry
from kernels.states import Replay, StateRows
from worker.config import EngineConfig
from worker.models.layers.kv_cache import KVCacheLayout
from worker.plan.plan import Admit, DraftRow, Row
from worker.rank.batch import Batch
from worker.rank.state_rows import DraftRows
from worker.rank.transfer import scatter

_NOWHERE: Final = 1 << 62
"""Position of a state without kept inputs. It is greater than any position, so nothing is replayed.
"""


def num_replayed(config: EngineConfig, layout: KVCacheLayout) -> int:
    """Maximum number of tokens that are replayed into a state: those of a draft row; 0 if there are
    no drafts or no states."""
    if config.speculative is None or not layout.states:
        return 0
    return 1 + config.speculative.num_speculative_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayStep:
    """Draft rows of a step, and the replay before its rows."""

    kept: torch.Tensor
    """int64 [R]: slots of the rows; -1 for draft rows (`StateRows.kept`)."""
    replay: Replay


class StateReplays:
    """Tracks the states of slots whose last row was a draft row, and plans replays of accepted
    drafts.

    Args:
        num_slots: number of slots, including the dummy slot.
        num_tokens: maximum number of tokens of a draft row, and of replayed tokens.
        device: the rank's device.
    """

    def __init__(self, num_slots: int, num_tokens: int, device: torch.device) -> None:
        self.num_tokens = num_tokens
        """Number of cells per slot in which the inputs of a draft row are kept."""
        self._positions = torch.full((num_slots,), _NOWHERE, dtype=torch.int64, device=device)
        """[slots]: position of the state of a slot whose last row was a draft row."""
        self._is_drafted = np.zeros(num_slots, dtype=np.bool_)
        """[slots]: whether the slot's last row was a draft row."""
        self._uses_bounds = registry.uses_triton(device)
        """Whether numbers of replayed tokens are upper bounds, since only the device knows the
        actual ones."""

    def admit(self, admits: Sequence[Admit]) -> None:
        """Resets slots that get a new request, which has no drafts yet."""
        slots = [admit.slot for admit in admits if self._is_drafted[admit.slot]]
        if slots:
            self._is_drafted[slots] = False
            scatter(self._positions, slots, len(slots) * [_NOWHERE])

    def next_rows(self, rows: Sequence[Row]) -> DraftRows | None:
        """Draft rows of the next step, and rows that follow draft rows; None if there are neither.
        Must be called once per step."""
        replayed = [number for number, row in enumerate(rows) if self._is_drafted[row.slot]]
        drafts = [number for number, row in enumerate(rows) if isinstance(row, DraftRow)]
        for number in replayed:
            self._is_drafted[rows[number].slot] = False
        for number in drafts:
            self._is_drafted[rows[number].slot] = True
        return DraftRows(drafts, replayed) if replayed or drafts else None

    def step(self, batch: Batch) -> ReplayStep:
        """The replay before a step's rows, which advances the positions of the states; does not
        wait for the device. Must be called once per step that has a replay."""
        assert batch.has_replay, "nothing to replay"
        assert batch.staged is not None, "the compiled library does not support states"
        assert batch.starts is not None, "the compiled library does not support states"
        staged, starts = batch.staged, batch.starts
        kept, slots = staged["kept"], staged["slots"]
        # Replay: tokens from a state's position up to its row.
        own = staged["replay_rows"]
        rows, cells = self._rows(
            slots[own], starts[own], staged["replay_positions"], staged["replay_targets"]
        )
        # Kept inputs: those of draft rows, whose states stay at the positions where the rows begin.
        tokens, of_rows = staged["kept_tokens"], staged["kept_rows"]
        positions = starts[of_rows] + tokens - staged["query_start"][of_rows]
        replay = Replay(
            rows=rows,
            cells=cells,
            tokens=tokens,
            kept=self._cells(staged["kept_slots"], positions),
        )
        self._positions.index_copy_(0, slots, torch.where(kept < 0, starts, _NOWHERE))
        return ReplayStep(kept=kept, replay=replay)

    def _rows(
        self,
        slots: torch.Tensor,
        starts: torch.Tensor,
        positions: torch.Tensor,
        targets: torch.Tensor,
    ) -> tuple[StateRows, torch.Tensor]:
        """Rows that are replayed, and the cells of their tokens.

        Args:
            slots: [F]: slots of the rows that follow draft rows.
            starts: [F]: first positions of these rows.
            positions: [F]: positions whose states are stored, if the replay passes them.
            targets: [F]: indices in the state caches to which these states are copied.
        """
        states, count = self._positions[slots], self.num_tokens
        lengths = (starts - states).clamp(0, count)
        # Two pieces per row: up to the state that is stored, and after it.
        before = positions - states
        is_stored = (before > 0) & (before <= lengths)
        before = torch.where(is_stored, before, 0)
        pieces = torch.stack((before, lengths - before), dim=1).view(-1)
        piece_starts = torch.cat((pieces.new_zeros(1), pieces.cumsum(0)))
        stored = torch.where(is_stored, targets, -1)
        numbers = torch.arange(len(slots) + 1, device=slots.device)
        rows = StateRows(
            slots=slots,
            starts=states,
            piece_starts=piece_starts,
            piece_rows=numbers[:-1].repeat_interleave(2),
            piece_targets=torch.stack((stored, torch.full_like(stored, -1)), dim=1).view(-1),
            row_pieces=2 * numbers,
            num_decodes=0,
            longest=count,
            has_outputs=False,
        )
        # Tokens of all rows, in order: tokens after the last one count as part of the last row.
        most = len(slots) * count
        if not self._uses_bounds:
            most, distances = int(lengths.sum()), (starts - states)[states < _NOWHERE]
            assert bool(((distances >= 0) & (distances <= count)).all()), "inputs are missing"
        tokens, row_ends = torch.arange(most, device=slots.device), lengths.cumsum(0)
        of_row = torch.searchsorted(row_ends, tokens, right=True).clamp(max=len(slots) - 1)
        offsets = tokens - (row_ends - lengths)[of_row]
        return rows, self._cells(slots[of_row], states[of_row] + offsets)

    def _cells(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Cells of the inputs at positions of slots, [n] each."""
        return slots * self.num_tokens + positions % self.num_tokens
