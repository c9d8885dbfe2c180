"""Sampling parameters of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

GREEDY_BELOW = 1e-5
"""Temperature below which rows are greedy, since dividing by such a temperature could overflow."""


class TokenCells(NamedTuple):
    """Cells of a pool to which sampled tokens are written."""

    tokens: torch.Tensor
    """int32 [n]: the flat token pool."""
    cells: torch.Tensor
    """int64 [R]: cell of each row's token; for shared cells the result is arbitrary."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParameters:
    """Sampling parameters, [R] each, one per row of the logits; None for filters that no row
    uses."""

    temperature: torch.Tensor
    """fp32: temperatures; rows below GREEDY_BELOW are greedy, regardless of other parameters."""
    seeds: torch.Tensor
    """int64: keys of the noise."""
    positions: torch.Tensor
    """int64: positions of the new tokens."""
    top_k: torch.Tensor | None = None
    """int64: number of most likely tokens to keep; 0 keeps all."""
    top_p: torch.Tensor | None = None
    """fp32: top-p, the cumulative probability of the most likely tokens to keep; 1 keeps all."""
    log_min_p: torch.Tensor | None = None
    """fp32: logarithm of min-p, at most 0: logits below the largest one plus this are dropped; -inf
    keeps all."""
    max_top_k: int | None = None
    """Upper bound of `top_k`, if known on the host."""

    @property
    def filters(self) -> bool:
        """Whether any row may exclude tokens."""
        return not (self.top_k is None and self.top_p is None and self.log_min_p is None)
