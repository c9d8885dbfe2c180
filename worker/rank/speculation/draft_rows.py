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
    """Maximum pages of a row."""
    size: int | None
    """Rows of the graph; None for an eager pass."""
    filters: tuple[str, ...]
    max_top_k: int
    on_host: tuple[IntArray, IntArray] | None = None
    """`starts` and `last` on the host, for attention backends that need exact lengths; None if only
    the device has them."""

    def cells(self, positions: torch.Tensor, tables: DeviceTables) -> torch.Tensor:
        """Cells [F] of the flat token pool for drafts at these positions [F], the next ones; those
        of rows that have all their drafts are in the dummy slot."""
        cells = self.staged["slots"] * tables.token_stride + positions
        nowhere = tables.dummy_slot * tables.token_stride
        return torch.where(self.starts < self.last, cells, nowhere)

    def advance(self, positions: torch.Tensor) -> None:
        """Advances the rows to these positions [F], or to their last drafts."""
        self.starts.copy_(torch.minimum(positions, self.last))
        if self.on_host is not None:
            starts, last = self.on_host
            np.minimum(starts + 1, last, out=starts)


def drafting_arrays(
    tables: DeviceTables, slots: IntArray, size: int
) -> dict[str, npt.NDArray[Any]]:
    """Arrays of the rows' slots and sampling parameters, padded to `size` with dummy rows."""
    sampling = tables.sampling
    padding = np.full(size - len(slots), tables.dummy_slot, dtype=np.int64)
    slots = np.concatenate((slots, padding))
    columns = sampling.columns(slots, slots)
    del columns["positions"]  # unknown on the host
    return {"slots": slots, "query_start": np.arange(size + 1, dtype=np.int64)} | columns


def decode_batch(
    rows: DraftingRows,
    positions: torch.Tensor,
    tables: DeviceTables,
    ends: Sequence[int] | None = None,
) -> Batch:
    """Batch of a decode step that computes one position [F] of each row; `ends`: the positions
    after these, if the host has them."""
    count = len(positions)
    table = np.zeros((count, 4), dtype=np.int64)
    table[:, 2] = 1
    return Batch(
        rows=table,
        num_rows=count,
        num_decodes=count,
        ends=ends or [rows.num_pages * tables.page_size] * count,
        staged=rows.staged,
        starts=positions,
        sampling=None,
        prompts=(),
        size=rows.size,
    )
