"""The parameters of one draw of tokens besides the logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them would overflow."""


class TokenCells(NamedTuple):
    """Cells where tokens are put besides, once they are drawn."""

    tokens: torch.Tensor
    """int32, of one dimension."""
    cells: torch.Tensor
    """[R] int64: the place in it of each row's token. Where several rows share one, any may win."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParameters:
    """One entry per row of the logits, [R] each; None where no row filters by it."""

    temperature: torch.Tensor
    """fp32; rows under GREEDY_BELOW take the likeliest token, and nothing else counts for them."""
    seeds: torch.Tensor
    """int64."""
    positions: torch.Tensor
    """int64: where the new tokens will stand."""
    top_k: torch.Tensor | None = None
    """int64, 0 keeps all."""
    top_p: torch.Tensor | None = None
    """fp32, 1 keeps all."""
    log_min_p: torch.Tensor | None = None
    """fp32: logits further below the largest are dropped; -inf keeps all."""
    max_top_k: int | None = None
    """The largest of `top_k`, where the host knows it."""

    @property
    def filters(self) -> bool:
        """Whether any row may drop tokens."""
        return not (self.top_k is None and self.top_p is None and self.log_min_p is None)
