"""Rows for which a proposer drafts one token after another: their parameters and decode steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from worker.rank.batch import Batch
from worker.rank.tables import DeviceTables
from worker.rank.transfer import IntArray, StagedArrays


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftingRows:
    """F rows for which a pass drafts one token each."""

    staged: StagedArrays
    """Arrays slots, query_start, seeds, temperature, top_k, top_p and log_min_p, on the device."""
    starts: torch.Tensor
    """[F] int64: positions of the latest tokens, advanced by each pass."""
    last: torch.Tensor
    """[F] int64: positions of the last tokens to draft."""
    num_pages: int
    """Maximum number of pages of a row."""
    size: int | None
    """Number of rows of the graph; None for an eager pass."""
    filters: tuple[str, ...]
    max_top_k: int

    def cells(self, positions: torch.Tensor, tables: DeviceTables) -> torch.Tensor:
        """Cells [F] of the flat token pool at `positions` [F], to which drafts are written. Rows
        that have all their drafts get cells in the dummy slot."""
        cells = self.staged["slots"] * tables.token_stride + positions
        nowhere = tables.dummy_slot * tables.token_stride
        return torch.where(self.starts < self.last, cells, nowhere)

    def advance(self, positions: torch.Tensor) -> None:
        """Advances the rows to `positions` [F], but not past their last drafts."""
        self.starts.copy_(torch.minimum(positions, self.last))


def drafting_arrays(
    tables: DeviceTables, slots: IntArray, size: int
) -> dict[str, npt.NDArray[Any]]:
    """Arrays of the rows' slots and sampling parameters, padded to `size` with dummy rows."""
    sampling = tables.sampling
    padding = np.full(size - len(slots), tables.dummy_slot, dtype=np.int64)
    slots = np.concatenate((slots, padding))
    columns = sampling.columns(slots, slots)
    del columns["positions"]  # not known on the host
    return {"slots": slots, "query_start": np.arange(size + 1, dtype=np.int64)} | columns


def decode_batch(
    rows: DraftingRows,
    positions: torch.Tensor,
    tables: DeviceTables,
    ends: Sequence[int] | None = None,
) -> Batch:
    """Batch of a decode step that computes one position [F] of each row.

    Args:
        positions: [F] int64: positions to compute.
        tables: the rank's tables.
        ends: [F]: `positions` + 1 on the host, for attention that requires exact lengths; None if
            the host does not know them.
    """
    count = len(positions)
    table = np.zeros((count, 4), dtype=np.int64)
    table[:, 2] = 1
    return Batch(
        rows=table,
        num_rows=count,
        num_decodes=count,
        ends=[rows.num_pages * tables.page_size] * count if ends is None else list(ends),
        staged=rows.staged,
        starts=positions,
        sampling=None,
        prompts=(),
        size=rows.size,
    )
