"""Types of Kimi Delta Attention: projections of its gates, weights of a layer."""

from __future__ import annotations

from typing import NamedTuple

import torch


class KimiGates(NamedTuple):
    """Projections of T tokens before their activations; rows may be strided."""

    decay: torch.Tensor
    """[T, H * K]: decays per key dimension."""
    share: torch.Tensor
    """[T, H]: step sizes (beta)."""
    output: torch.Tensor
    """[T, H * V]: gates of the outputs."""


class KimiDeltaLayer(NamedTuple):
    """Weights of a layer with H heads, whose keys have K dimensions and whose values have V."""

    log_rate: torch.Tensor
    """[H] fp32 (A_log): logarithms of the rates of decay."""
    step_bias: torch.Tensor
    """[H * K] fp32 (dt_bias): added to the projected decays."""
    norm: torch.Tensor
    """[V] fp32: weight of the norm over each head of outputs."""
    eps: float
    """Number that the norm adds to the mean square."""

    @property
    def key_dim(self) -> int:
        """K: dimensions of keys."""
        return len(self.step_bias) // len(self.log_rate)
