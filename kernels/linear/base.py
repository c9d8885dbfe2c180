"""The form in which a linear weight is multiplied."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class PackedLinear(ABC):
    """A linear weight [N, K], packed once and multiplied many times."""

    out_features: int
    in_features: int

    @abstractmethod
    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x [T, K] times the transposed weight, plus bias [N]: [T, N]."""
