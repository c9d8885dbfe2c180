"""Running blocks of one Plan, and the positions whose logits they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from worker.plan.plan import BlockRow
from worker.protocol.messages import TokenLogprobs
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
    needs_logits: BoolArray | None = None
    """[B]: positions whose logits the next step needs."""
    first: int = 0
    """Index of the block's first row among the logits of the next forward pass."""
    mask: bytes | None = None
    """Grammar bitmask of the leftmost undecided position; None if there is no grammar."""
    is_done: bool = False
    is_paused: bool = False
    """Whether the grammar must check proposed tokens before the block continues."""
    is_committed: bool = False
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """Log-probabilities of `token_ids`; None for each token if the request does not return any."""
    num_rounds: int = 0
    num_forwards: int = 0

    @property
    def is_over(self) -> bool:
        """Whether this Plan decides no further positions of the block."""
        return self.is_done or self.is_paused


def index_logits(
    blocks: Sequence[RunningBlock], table: BlockTable, *, only_needed: bool
) -> _Indices:
    """Indices [S] of the tokens of the next forward pass whose logits are needed; sets
    `needs_logits` and `first` of the blocks.

    Args:
        blocks: the running blocks, with `first_token` set for that pass.
        table: the running blocks' tokens.
        only_needed: as in `scored_positions`.
    """
    tokens, num_logits = [np.zeros(0, dtype=np.int64)], 0
    for block in blocks:
        slot = block.row.slot
        if block.is_over:
            block.needs_logits = np.zeros(table.block_size, dtype=np.bool_)
        else:
            # Under a grammar, undecided positions need logits; every algorithm scores these.
            algorithm = table.algorithm(table.algorithm_name(slot))
            undecided, fixed = table.undecided[slot].copy(), table.fixed[slot]
            block.needs_logits = scored_positions(
                algorithm, undecided, fixed, only_needed=only_needed
            )
        tokens.append(block.first_token + np.flatnonzero(block.needs_logits))
        block.first = num_logits
        num_logits += len(tokens[-1])
    return np.concatenate(tokens)


def logits_rows(blocks: Sequence[RunningBlock], rows: _Indices, columns: _Indices) -> _Indices:
    """Rows [S] of a pass's logits for positions `columns` [S] of blocks `rows` [S]."""
    needs_logits = np.array([block.needs_logits for block in blocks])
    assert needs_logits[rows, columns].all(), "a scored position has no logits"
    first = np.array([block.first for block in blocks], dtype=np.int64)
    indices: _Indices = first[rows] + (needs_logits.cumsum(axis=1) - 1)[rows, columns]
    return indices
