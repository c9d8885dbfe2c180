"""The blocks of one Plan, and which positions of each pass their next step reads."""

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
    """One block of the Plan."""

    row: BlockRow
    """The positions of the block alone."""
    first_token: int
    """Index of its first position among the tokens of the next forward pass."""
    reads: BoolArray | None = None
    """[B]: positions whose hidden states the next step reads."""
    first: int = 0
    """Index of the first of `reads` among all positions that are read of that pass."""
    mask: bytes | None = None
    """Under a grammar: of the leftmost undecided position."""
    is_done: bool = False
    is_paused: bool = False
    """Whether the grammar must be asked before it can go on."""
    is_committed: bool = False
    token_ids: list[int] = field(default_factory=list)
    num_rounds: int = 0
    num_forwards: int = 0

    @property
    def is_over(self) -> bool:
        """Whether no further round is to decide anything in it before control goes back."""
        return self.is_done or self.is_paused


def index_reads(
    blocks: Sequence[RunningBlock], table: BlockTable, *, only_needed: bool
) -> _Indices:
    """Tokens [S] of the next pass that the step after it reads; notes where each block's will be.

    Args:
        blocks: with the indices of their tokens in that pass.
        table: of all slots.
        only_needed: see `scored_positions`; otherwise whole blocks are read.
    """
    tokens, num_read = [np.zeros(0, dtype=np.int64)], 0
    for block in blocks:
        slot = block.row.slot
        if block.is_over:
            block.reads = np.zeros(table.block_size, dtype=np.bool_)
        else:
            # Under a grammar it is the undecided ones, which any algorithm scores, too.
            algorithm = table.algorithm(table.algorithm_name(slot))
            undecided, fixed = table.undecided[slot].copy(), table.fixed[slot]
            block.reads = scored_positions(algorithm, undecided, fixed, only_needed=only_needed)
        tokens.append(block.first_token + np.flatnonzero(block.reads))
        block.first = num_read
        num_read += len(tokens[-1])
    return np.concatenate(tokens)


def read_indices(blocks: Sequence[RunningBlock], rows: _Indices, columns: _Indices) -> _Indices:
    """Indices of columns of these blocks among all positions that are read of a pass."""
    reads = np.array([block.reads for block in blocks])
    assert reads[rows, columns].all(), "scored, but not read"
    first = np.array([block.first for block in blocks], dtype=np.int64)
    indices: _Indices = first[rows] + (reads.cumsum(axis=1) - 1)[rows, columns]
    return indices
