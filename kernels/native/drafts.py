"""What the compiled library needs to draft with a small model, and what it yields."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.native.library import Drafting
from kernels.sample_tokens.base import GREEDY_BELOW

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftSettings:
    """How rows draw, and when their drafts end; [R] each unless said otherwise.

    A guess has a level, by the probability that the small model gives it. Drafts end before the
    first that is right, with all before it, with less probability than `threshold`.
    """

    temperature: Floats
    top_p: Floats
    log_min_p: Floats
    top_k: Integers
    seeds: Integers
    shares: Floats
    """[R, levels]: how likely a guess of each level is right."""
    bounds: Floats
    """[levels], descending to 0: the least probability of each level."""
    threshold: float

    def describe(self, token_pool: torch.Tensor, drafts: NativeDrafts) -> Drafting:
        """For the library, for as long as all of it lives."""
        arrays = (self.temperature, self.top_p, self.log_min_p, self.top_k, self.seeds)
        assert all(array.flags.c_contiguous for array in (*arrays, self.shares, self.bounds))
        return Drafting(
            *(array.ctypes.data for array in (*arrays, self.shares, self.bounds)),
            len(self.bounds),
            GREEDY_BELOW,
            self.threshold,
            token_pool.data_ptr(),
            drafts.tokens.shape[1],
            *(array.ctypes.data for array in (drafts.tokens, drafts.levels)),
            *(array.ctypes.data for array in (drafts.guessed, drafts.drafted)),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeDrafts:
    """Guesses of each row, of which the first are drafts."""

    tokens: Integers
    """[R, most]"""
    levels: Integers
    """[R, most]"""
    guessed: Integers
    """[R]: guesses of the row."""
    drafted: Integers
    """[R]: those of them that are worth verifying: all, or all but the last."""

    @staticmethod
    def room(num_rows: int, most: int) -> NativeDrafts:
        """Arrays to be filled."""
        shape = (num_rows, most)
        return NativeDrafts(
            tokens=np.empty(shape, dtype=np.int64),
            levels=np.empty(shape, dtype=np.int64),
            guessed=np.empty(num_rows, dtype=np.int64),
            drafted=np.empty(num_rows, dtype=np.int64),
        )
