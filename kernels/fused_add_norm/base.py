"""The norms of hidden states that the blocks of a layer read."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Norm(NamedTuple):
    """One norm over rows [H], and in which type its result is."""

    weight: torch.Tensor
    """[H]."""
    bias: torch.Tensor | None = None
    """[H], added to what the weight makes of a row that LayerNorm normalised; None for none."""
    subtracts_mean: bool = False
    """Whether it is of the differences from a row's mean, as LayerNorm; these are rounded once, at
    the end, and others before the weight and after it, as `rms_norm` does."""
    is_wide: bool = False
    """Whether the result is fp32: the same numbers, rounded to the type of the rows."""
