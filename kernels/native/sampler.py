"""Draws by the compiled library: torch's operators go over all logits a dozen times."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from kernels.native.library import RandomRows, library
from kernels.sample_tokens.base import SamplingParameters


def sample_native(
    logits: torch.Tensor, random: SamplingParameters | None, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """One token per row of fp32 logits [R, vocab] on CPU: int64 [R].

    Args:
        logits: they stay as they are.
        random: parameters of the rows that draw at random, [n] each, all with a temperature; None
            where every row takes its likeliest token.
        rows: [n] int64, which rows these are; None for all.
    """
    count, vocab_size = logits.shape
    logits = logits.contiguous()
    tokens = torch.empty(count, dtype=torch.int64)
    described = None if random is None else ctypes.byref(_describe(random, rows))
    library().rayfleet_sample(logits.data_ptr(), count, vocab_size, described, tokens.data_ptr())
    return tokens


def _describe(random: SamplingParameters, rows: torch.Tensor | None) -> RandomRows:
    columns = (rows, random.seeds, random.positions, random.temperature)
    filters = (random.top_k, random.top_p, random.log_min_p)
    addresses = [None if one is None else one.data_ptr() for one in (*columns, *filters)]
    return RandomRows(len(random.seeds), *addresses)


def apply_bitmask_native(logits: torch.Tensor, rows: Sequence[int], masks: bytes) -> None:
    """Sets fp32 logits [R, vocab] to -inf, in place, where the bit of the token is 0.

    Args:
        logits: contiguous.
        rows: which of them are masked.
        masks: ceil(vocab / 32) little-endian words for each of these.
    """
    vocab_size = logits.shape[1]
    assert len(masks) == len(rows) * -(-vocab_size // 32) * 4, "one row of words per masked row"
    index = np.array(rows, dtype=np.int64)
    library().rayfleet_apply_bitmask(
        logits.data_ptr(), vocab_size, index.ctypes.data, len(rows), masks
    )
