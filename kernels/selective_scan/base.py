"""Weights and sizes of a selective scan."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ScanLayer(NamedTuple):
    """Weights and sizes of a layer with H heads of P values, in G groups. The heads of a group
    share B and C, which have N values each."""

    log_rate: torch.Tensor
    """[H] fp32 (A_log): logarithms of the rates of decay."""
    step_bias: torch.Tensor
    """[H] fp32 (dt_bias): added to the step sizes before softplus."""
    skip: torch.Tensor
    """[H] fp32 (D): weights of the skip connections from inputs to outputs."""
    num_groups: int
    """G, a divisor of H: consecutive heads share a group."""
    head_dim: int
    """P: values per head."""
    state_dim: int
    """N: values of B and of C per group."""

    @property
    def widths(self) -> list[int]:
        """Widths of x, B and C in an input."""
        shared = self.num_groups * self.state_dim
        return [len(self.log_rate) * self.head_dim, shared, shared]
