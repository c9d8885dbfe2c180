"""Drafting with a small model in the compiled library, one call for all rows and drafts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.native.decoder import NativeDecoder
from kernels.native.library import Drafting, StepRows
from kernels.sample_tokens.base import GREEDY_BELOW

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftTables:
    """Tokens, pages and parameters of each slot, in arrays that stay where they are.

    A guess has a level, by the probability that the small model gives it.
    """

    token_pool: torch.Tensor
    """[slots, positions] int32."""
    page_table: torch.Tensor
    """[slots, pages] int32."""
    temperature: FloatArray
    top_p: FloatArray
    log_min_p: FloatArray
    top_k: IntArray
    seeds: IntArray
    end_tokens: IntArray
    """[slots, n]: tokens that end a request, -1 for none."""
    shares: FloatArray
    """[slots, levels]: how likely a guess of each level is right."""
    bounds: FloatArray
    """[levels], descending to 0: the least probability of each level."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeDrafts:
    """Guesses of each row, of which the first are drafts."""

    tokens: list[list[int]]
    """Each row's guesses."""
    levels: list[list[int]]
    drafted: list[int]
    """How many guesses of each row to verify: all, or all but the last."""


class NativeDrafter:
    """Drafts until they are too unlikely to count.

    Args:
        decoder: of the small model, whole on this rank, with its cache bound.
        tables: of the slots. HAZARD: the library has their addresses only.
        most: drafts of a row.
    """

    def __init__(self, decoder: NativeDecoder, tables: DraftTables, most: int) -> None:
        self._decoder = decoder
        self._tables = tables
        num_slots = len(tables.token_pool)
        self._tokens = np.empty((num_slots, most), dtype=np.int64)
        self._levels = np.empty((num_slots, most), dtype=np.int64)
        self._counts = np.empty((2, num_slots), dtype=np.int64)
        columns = (tables.temperature, tables.top_p, tables.log_min_p, tables.top_k, tables.seeds)
        arrays = (*columns, tables.end_tokens, tables.shares, tables.bounds)
        assert all(array.flags.c_contiguous for array in arrays)
        self._drafting = Drafting(
            *(array.ctypes.data for array in (*columns, tables.end_tokens)),
            tables.end_tokens.shape[1],
            *(array.ctypes.data for array in (tables.shares, tables.bounds)),
            len(tables.bounds),
            GREEDY_BELOW,
            0.0,
            tables.token_pool.data_ptr(),
            most,
            *(array.ctypes.data for array in (self._tokens, self._levels)),
            *(array.ctypes.data for array in self._counts),
        )
        self._step = StepRows(
            0, None,
            tables.token_pool.data_ptr(), tables.token_pool.stride(0),
            tables.page_table.data_ptr(), tables.page_table.stride(0),
            None, -1,
        )  # fmt: skip

    def draft(self, rows: IntArray, threshold: float) -> NativeDrafts:
        """Tokens that follow each row, drawn as their requests draw; they go into the pool, too.

        Args:
            rows: [R, 4], contiguous: slot, first position, number of tokens, most drafts.
            threshold: drafts end before the first that is right, with all before it, with less
                probability than this.
        """
        num_rows = len(rows)
        self._step.num_rows, self._step.rows = num_rows, rows.ctypes.data
        self._drafting.threshold = threshold
        self._decoder.draft(self._step, self._drafting)
        guessed, drafted = self._counts[:, :num_rows].tolist()
        return NativeDrafts(
            tokens=[self._tokens[row, :count].tolist() for row, count in enumerate(guessed)],
            levels=[self._levels[row, :count].tolist() for row, count in enumerate(guessed)],
            drafted=drafted,
        )
