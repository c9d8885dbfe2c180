"""Head norms: norms over each head of queries, keys and values."""

from __future__ import annotations

from typing import NamedTuple

import torch


class HeadNorms(NamedTuple):
    """RMSNorms over each head (QK norm)."""

    q: torch.Tensor
    """[D]: weight for heads of queries."""
    k: torch.Tensor
    """[D]: weight for heads of keys."""
    eps: float
    """Number that the norms add to the mean square."""
    after_rotation: bool = False
    """Whether norms are applied after rotary embedding instead of before."""
    of_values: bool = False
    """Whether heads of values are also normalized, without a weight."""
