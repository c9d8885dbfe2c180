"""Types of the gated delta net: inputs of the rule, weights of a layer."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

LENGTH_EPS: Final = 1e-6
"""Number added to the sum of squares when queries and keys are L2-normalized."""


class DeltaInputs(NamedTuple):
    """Inputs of T positions in fp32: consecutive positions of one row, or one position of each of T
    rows."""

    q: torch.Tensor
    """[T, H, K]: scaled queries."""
    k: torch.Tensor
    """[T, H, K]: L2-normalized keys."""
    v: torch.Tensor
    """[T, H, V]: values."""
    decay: torch.Tensor
    """[T, H], or [T, H, K] with a decay per key dimension: logarithms of the decay, at most 0."""
    share: torch.Tensor
    """[T, H]: step sizes (beta), the fraction of v - S^T k that updates the state."""

    def part(self, start: int, end: int) -> DeltaInputs:
        """Inputs of positions [start, end)."""
        return DeltaInputs(*(tensor[start:end] for tensor in self))


class DeltaLayer(NamedTuple):
    """Weights and sizes of a layer with Hk key heads and H value heads."""

    conv: torch.Tensor
    """[N, C]: weights of the convolution by input (the newest last) and by channel (C = 2 Hk K + H
    V, for all queries, keys and values)."""
    log_rate: torch.Tensor
    """[H] fp32 (A_log): logarithms of the rates of decay."""
    step_bias: torch.Tensor
    """[H] fp32 (dt_bias): added to the projected decays."""
    norm: torch.Tensor
    """[V]: weight of the norm over each head of outputs."""
    eps: float
    """Number that the norm adds to the mean square."""
    num_key_heads: int
    """Hk, a divisor of H: consecutive value heads share a key head."""
    key_dim: int
    """K: dimensions of keys."""
    share_scale: float = 1.0
    """Factor by which the step sizes (sigmoids) are multiplied: with 2, a state's transition may
    have negative eigenvalues (arXiv 2411.12537)."""

    @property
    def widths(self) -> list[int]:
        """Widths of q, k, v, z, b and a in a projected token: z gates the outputs; b and a are the
        step sizes and the decays before their activations."""
        num_heads = len(self.log_rate)
        keys, values = self.num_key_heads * self.key_dim, num_heads * len(self.norm)
        return [keys, keys, values, values, num_heads, num_heads]
