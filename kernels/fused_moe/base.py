"""Inputs of the fused mixture of experts."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.linear import BlockScales, PackedCodes, dequantize, pack_codes
from kernels.registry import registry


class ExpertWeights(NamedTuple):
    """Linear weights [N, K] of E experts."""

    values: torch.Tensor
    """[E, N, K] in the dtype of the inputs. With `scaling`, codes as in `dequantize`; with
    `packed`, packed words."""
    scaling: BlockScales | None = None
    """Scales of codes; None if `values` are not codes."""
    packed: PackedCodes | None = None
    """Quantized weights in the layout of Triton kernels; None for other weights."""

    def of(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """The weight [N, K] of one expert, dequantized to `dtype` if it is quantized."""
        if self.scaling is None:
            return self.values[expert]
        zeros = self.scaling.zeros
        own = self.scaling._replace(
            scales=self.scaling.scales[expert], zeros=None if zeros is None else zeros[expert]
        )
        return dequantize(self.values[expert], own, dtype=dtype)


class Experts(NamedTuple):
    """Weights of E MLPs."""

    gate_up: ExpertWeights
    """[E, 2 * I, H]: gate and up projections, rows of the gate first; without gates [E, I, H]."""
    down: ExpertWeights
    """[E, H, I]: down projections."""


class ExpertBiases(NamedTuple):
    """Biases of the experts' projections, in the dtype of the inputs."""

    gate_up: torch.Tensor
    """[E, 2 * I]: biases of gate and up projections."""
    down: torch.Tensor
    """[E, H]: biases of down projections."""


class ExtraTerms(NamedTuple):
    """Terms that are added to the sum of a token's experts."""

    shared: torch.Tensor | None = None
    """[T, H] in the dtype of the inputs: output of the shared expert; None if unused."""
    gate: torch.Tensor | None = None
    """fp32 [T, 1], rows may be strided: its sigmoid multiplies `shared`; None if there is no
    gate."""
    first_zero_expert: int | None = None
    """First id of zero-computation experts, whose output is their input; None if there are none."""


def pack_quantized_experts(weights: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
    """Packs quantized weights for their device. On CPU, or if fewer than 16 adjacent features share
    a scale, they are dequantized to `dtype` one expert at a time."""
    assert weights.scaling is not None, "the weights are not quantized"
    if registry.uses_triton(weights.values.device):
        packed = pack_codes(weights.values, weights.scaling, dtype=dtype)
        if packed is not None:
            return ExpertWeights(packed.words, packed=packed)
    first = weights.of(0, dtype)
    plain = first.new_empty(len(weights.values), *first.shape)
    for expert, out in enumerate(plain):
        out.copy_(weights.of(expert, dtype))
    return ExpertWeights(plain)
