"""Native sampler: samples in the compiled library, since torch operators would read all logits a
dozen times."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from kernels.native.library import SamplingColumns, library
from kernels.sample_tokens.base import GREEDY_BELOW, SamplingParameters


def sample_native(logits: torch.Tensor, parameters: SamplingParameters | None) -> torch.Tensor:
    """Samples one token per row of fp32 logits [R, vocab] on CPU: int64 [R].

    Args:
        logits: fp32 [R, vocab]; not modified.
        parameters: sampling parameters of the rows, [R] each; None if all are greedy.
    """
    count, vocab_size = logits.shape
    logits = logits.contiguous()
    tokens = torch.empty(count, dtype=torch.int64)
    described = None if parameters is None else ctypes.byref(_describe(parameters))
    library().rayfleet_sample(logits.data_ptr(), count, vocab_size, described, tokens.data_ptr())
    return tokens


def _describe(parameters: SamplingParameters) -> SamplingColumns:
    columns = (parameters.seeds, parameters.positions, parameters.temperature)
    filters = (parameters.top_k, parameters.top_p, parameters.log_min_p)
    addresses = [None if column is None else column.data_ptr() for column in (*columns, *filters)]
    return SamplingColumns(GREEDY_BELOW, *addresses)


def apply_bitmask_native(logits: torch.Tensor, rows: Sequence[int], masks: bytes) -> None:
    """Sets fp32 logits [R, vocab] to -inf, in place, for tokens whose bit is 0.

    Args:
        logits: fp32 [R, vocab], contiguous.
        rows: masked rows.
        masks: ceil(vocab / 32) little-endian int32 words per masked row.
    """
    vocab_size = logits.shape[1]
    assert len(masks) == len(rows) * -(-vocab_size // 32) * 4, "one row of words per masked row"
    index = np.array(rows, dtype=np.int64)
    library().rayfleet_apply_bitmask(
        logits.data_ptr(), vocab_size, index.ctypes.data, len(rows), masks
    )
