"""The inputs of a mixture of experts."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from kernels.gate_and_mul import clamped_swiglu, gelu_and_mul, silu_and_mul
from kernels.linear import BlockScales, dequantize
from kernels.registry import registry


class Activation(NamedTuple):
    """The activation of an expert: what it makes of its gates and ups."""

    kind: Literal["silu", "gelu", "clamped"] = "silu"
    """Name of the function: `silu_and_mul`, `gelu_and_mul` or `clamped_swiglu`."""
    alpha: float = 0.0
    """Factor alpha of `clamped_swiglu`."""
    limit: float = 0.0
    """Limit of `clamped_swiglu`."""

    def of(self, both: torch.Tensor) -> torch.Tensor:
        """[T, 2 * I], the gates first, to [T, I]."""
        if self.kind == "clamped":
            return clamped_swiglu(both, self.alpha, self.limit)
        return (silu_and_mul if self.kind == "silu" else gelu_and_mul)(both)


SILU, GELU = Activation("silu"), Activation("gelu")


class ExpertWeights(NamedTuple):
    """One linear weight [N, K] of each of E experts."""

    values: torch.Tensor
    """[E, N, K] in the type of the inputs; codes, as `dequantize` takes them, where they are
    scaled."""
    scaling: BlockScales | None = None

    def of(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """The weight [N, K] of one expert, in the type of the inputs."""
        if self.scaling is None:
            return self.values[expert]
        zeros = self.scaling.zeros
        own = self.scaling._replace(
            scales=self.scaling.scales[expert], zeros=None if zeros is None else zeros[expert]
        )
        return dequantize(self.values[expert], own, dtype=dtype)


class Experts(NamedTuple):
    """Gated MLPs."""

    gate_up: ExpertWeights
    """[E, 2 * I, H]; the gates' rows come first."""
    down: ExpertWeights
    """[E, H, I]."""


class ExpertBiases(NamedTuple):
    """Biases that are added to the experts' products, in the type of the inputs."""

    gate_up: torch.Tensor
    """[E, 2 * I]."""
    down: torch.Tensor
    """[E, H]."""


class Beside(NamedTuple):
    """Terms beside the experts: what is added to what a token's experts yield."""

    shared: torch.Tensor | None = None
    """[T, H] in the type of the inputs: what every token gets; None for nothing."""
    gate: torch.Tensor | None = None
    """fp32 [T, 1], rows may be strided: by the sigmoid of what that counts; None for fully."""
    first_idle: int | None = None
    """Experts from this number on yield their input; None where there are none such."""


def pack_quantized_experts(weights: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
    """Quantized weights as they are multiplied: on CUDA as they are, on CPU dequantized once, to
    `dtype`, expert by expert."""
    if registry.uses_triton(weights.values.device):
        return weights
    first = weights.of(0, dtype)
    plain = first.new_empty(len(weights.values), *first.shape)
    for expert, out in enumerate(plain):
        out.copy_(weights.of(expert, dtype))
    return ExpertWeights(plain)
