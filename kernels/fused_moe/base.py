"""What a mixture of experts is computed from."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from kernels.linear import BlockScales, dequantize
from kernels.registry import registry

Activation = Callable[[torch.Tensor], torch.Tensor]


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
    """What is added to the experts' products, in the type of the inputs."""

    gate_up: torch.Tensor
    """[E, 2 * I]."""
    down: torch.Tensor
    """[E, H]."""


class Beside(NamedTuple):
    """What is added to what a token's experts yield."""

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
