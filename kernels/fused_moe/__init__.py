"""A mixture of experts (MoE): gated MLPs, of which each token takes a few."""

from __future__ import annotations

import torch

from kernels.choose_experts.base import ExpertChoice
from kernels.fused_moe import reference
from kernels.fused_moe.base import (
    GELU,
    SILU,
    Activation,
    Beside,
    ExpertBiases,
    Experts,
    ExpertWeights,
    pack_quantized_experts,
)
from kernels.registry import registry

_FUSED_MOE = registry.register(
    "fused_moe",
    reference.fused_moe,
    triton="kernels.fused_moe.triton_kernel:fused_moe",
)


def fused_moe(
    x: torch.Tensor,
    experts: Experts,
    choice: ExpertChoice,
    *,
    biases: ExpertBiases | None = None,
    beside: Beside = Beside(),  # noqa: B008  # a tuple
    activation: Activation = SILU,
    first_expert: int = 0,
    weighs_inputs: bool = False,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Sum over each token's experts of weight * down(silu(gate(x)) * up(x)), or of another
    function of gates and ups, which are rounded before, as is what it comes to.

    x is [T, H], and so is the result, in the type of `x`. Quantized weights come to what the
    dequantized ones come to, bit for bit.

    Args:
        x: inputs.
        experts: their weights.
        choice: each token's experts.
        biases: of both products; None where there are none.
        beside: what is added to the sum.
        activation: what gates and ups come to.
        first_expert: the number that a choice has for the first of these experts; whoever is none
            of them yields nothing.
        weighs_inputs: whether what an expert reads is weighted, and not what it yields; then there
            are no biases.
        batch_invariant: whether a token's bits do not depend on the others.
    """
    assert biases is None or not weighs_inputs, "biases are not weighted"
    options = (biases, beside, activation, first_expert, weighs_inputs, batch_invariant)
    return _FUSED_MOE.select(x)(x, experts, choice, *options)


__all__ = [
    "GELU",
    "SILU",
    "Activation",
    "Beside",
    "ExpertBiases",
    "ExpertChoice",
    "ExpertWeights",
    "Experts",
    "fused_moe",
    "pack_quantized_experts",
]
