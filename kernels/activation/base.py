"""Activations of MLPs and experts, by kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kernels.activation import squared_relu
from kernels.gate_and_mul import (
    clamped_silu_and_mul,
    clamped_swiglu,
    gelu_and_mul,
    silu_and_mul,
)


@dataclass(frozen=True, slots=True)
class Activation:
    """Activation of an MLP or an expert, gated or not."""

    kind: Literal["silu", "gelu", "clamped", "clamped silu", "relu2"] = "silu"
    """Name of the function: `silu_and_mul`, `gelu_and_mul`, `clamped_swiglu`,
    `clamped_silu_and_mul` or `squared_relu`."""
    alpha: float = 0.0
    """Factor alpha of `clamped_swiglu`."""
    limit: float = 0.0
    """Limit of `clamped_swiglu` and `clamped_silu_and_mul`."""

    @property
    def is_gated(self) -> bool:
        """Whether there is a gate projection."""
        return self.kind != "relu2"

    def __call__(self, both: torch.Tensor) -> torch.Tensor:
        """Applies the activation to [T, 2 * I], outputs of the gate projection, then of the up
        projection; or, without a gate, to [T, I]. Returns [T, I]."""
        if self.kind == "relu2":
            return squared_relu(both)
        if self.kind == "clamped":
            return clamped_swiglu(both, self.alpha, self.limit)
        if self.kind == "clamped silu":
            return clamped_silu_and_mul(both, self.limit)
        return (silu_and_mul if self.kind == "silu" else gelu_and_mul)(both)


SILU, GELU, SQUARED_RELU = Activation("silu"), Activation("gelu"), Activation("relu2")
