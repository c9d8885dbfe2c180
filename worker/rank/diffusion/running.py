"""Running blocks of one Plan, and the hidden states that the next step of each reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from worker.plan.plan import BlockRow
from worker.rank.diffusion.base import BoolArray, scored_positions
from worker.rank.diffusion.table import BlockTable

_Indices = npt.NDArray[np.int64]


@dataclass(kw_only=True, slots=True)
class RunningBlock:
    """One running block of a Plan."""

    row: BlockRow
    """Row of the block's own positions."""
    first_token: int
    """Index of the block's first position among the tokens of the next forward pass."""
    reads: BoolArray | None = None
    """[B]: positions whose hidden states the next step reads."""
    first: int = 0
    """Index of the block's first read position among all that are read of that pass."""
    mask: bytes | None = None
    """Grammar bitmask of the leftmost undecided position; None without a grammar."""
    is_done: bool = False
    is_paused: bool = False
    """Whether the grammar has to check proposed tokens before the block continues."""
    is_committed: bool = False
    token_ids: list[int] = field(default_factory=list)
    num_rounds: int = 0
    num_forwards: int = 0

    @property
    def is_over(self) -> bool:
        """Whether no later round of this Plan decides positions of the block."""
        return self.is_done or self.is_paused


def index_reads(
    blocks: Sequence[RunningBlock], table: BlockTable, *, only_needed: bool
) -> _Indices:
    """Indices [S] of the tokens of the next forward pass whose hidden states are read; sets `reads`
    and `first` of the blocks.

    Args:
        blocks: the running blocks, `first_token` set for that pass.
        table: the running blocks' tokens.
        only_needed: as in `scored_positions`.
    """
    tokens, num_read = [np.zeros(0, dtype=np.int64)], 0
    for block in blocks:
        slot = block.row.slot
        if block.is_over:
            block.reads = np.zeros(table.block_size, dtype=np.bool_)
        else:
            # Under a grammar undecided positions are read, which every algorithm scores.
            algorithm = table.algorithm(table.algorithm_name(slot))
            undecided, fixed = table.undecided[slot].copy(), table.fixed[slot]
            block.reads = scored_positions(algorithm, undecided, fixed, only_needed=only_needed)
        tokens.append(block.first_token + np.flatnonzero(block.reads))
        block.first = num_read
        num_read += len(tokens[-1])
    return np.concatenate(tokens)


def read_indices(blocks: Sequence[RunningBlock], rows: _Indices, columns: _Indices) -> _Indices:
    """Indices [S], among all positions that are read of a pass, of position `columns` [S] of block
    `rows` [S]."""
    reads = np.array([block.reads for block in blocks])
    assert reads[rows, columns].all(), "scored, but not read"
    first = np.array([block.first for block in blocks], dtype=np.int64)
    indices: _Indices = first[rows] + (reads.cumsum(axis=1) - 1)[rows, columns]
    return indices
