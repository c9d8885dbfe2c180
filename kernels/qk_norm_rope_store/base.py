"""The norms that heads of queries and keys pass."""

from __future__ import annotations

from typing import NamedTuple

import torch


class HeadNorms(NamedTuple):
    """Root-mean-square norms, each over one head."""

    q: torch.Tensor
    """Weight of the queries' heads [D]."""
    k: torch.Tensor
    """Weight of the keys' heads [D]."""
    eps: float
    """Added to the mean square."""
    after_rotation: bool = False
    """Whether heads are normalised once they have rotated, and not before."""
    of_values: bool = False
    """Whether heads of the values are normalised, too, by no weight."""
