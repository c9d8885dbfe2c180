"""Norm: parameters of one norm of a residual sum."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Norm(NamedTuple):
    """A norm over rows [H], and the data type of its result."""

    weight: torch.Tensor
    """[H]: factors of the normalised row."""
    bias: torch.Tensor | None = None
    """[H]: bias of a LayerNorm; None for none."""
    subtracts_mean: bool = False
    """Whether the norm is a LayerNorm, which rounds once, at the end; an RMSNorm rounds before the
    weight and after it, as `rms_norm` does."""
    is_fp32: bool = False
    """Whether the result is fp32; its values are rounded to the type of the rows in any case."""
