"""Native drafter: drafting with a draft model in the compiled library, in one call for all rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.native.decoder import NativeDecoder
from kernels.native.head import NativeHead
from kernels.native.library import Drafting, StepRows
from kernels.sample_tokens.base import GREEDY_BELOW

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftTables:
    """Tokens, pages and sampling parameters of each slot, in arrays that the library reads.

    Each guess has a level, which depends on the probability that the draft model assigns to it.
    """

    token_pool: torch.Tensor
    """int32 [slots, positions]: tokens of each request."""
    page_table: torch.Tensor
    """int32 [slots, pages]: page ids."""
    temperature: FloatArray
    top_p: FloatArray
    log_min_p: FloatArray
    top_k: IntArray
    seeds: IntArray
    end_tokens: IntArray
    """[slots, n]: EOS and stop tokens of each request, padded with -1."""
    shares: FloatArray
    """[slots, levels]: probability that a guess of each level is correct."""
    bounds: FloatArray
    """[levels], descending to 0: minimum probability of a guess of each level."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeDrafts:
    """Tokens that the draft model guesses after each row; the leading ones are used as drafts."""

    tokens: list[list[int]]
    """Guesses of each row."""
    levels: list[list[int]]
    """Levels of each row's guesses."""
    drafted: list[int]
    """Number of drafts of each row: its guesses, without the last one if that is too unlikely to be
    accepted."""


class NativeDrafter:
    """Drafts tokens until their acceptance is too unlikely.

    Args:
        decoder: decoder of the draft model, replicated on this rank, or the model's head, with its
            KV cache bound.
        tables: tables of the slots. HAZARD: the library only keeps their addresses.
        most: maximum number of drafts per row.
    """

    def __init__(self, decoder: NativeDecoder | NativeHead, tables: DraftTables, most: int) -> None:
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
            None, -1, None,
        )  # fmt: skip

    def draft(self, rows: IntArray, threshold: float) -> NativeDrafts:
        """Drafts the tokens after each row, with its request's sampling parameters, and also writes
        them to the token pool.

        Args:
            rows: [R, 4], contiguous: slot, first position, number of tokens, maximum drafts. For a
                head, rows have only the newest token.
            threshold: minimum probability that a draft and all before it are accepted; the first
                draft below it ends the row's drafts.
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
