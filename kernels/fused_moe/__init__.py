"""Fused mixture of experts (MoE): gated MLPs, of which each token uses a few."""

from __future__ import annotations

import torch

from kernels.choose_experts.base import ExpertChoice
from kernels.fused_moe import reference
from kernels.fused_moe.base import (
    GELU,
    SILU,
    SQUARED_RELU,
    Activation,
    ExpertBiases,
    Experts,
    ExpertWeights,
    ExtraTerms,
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
    extra: ExtraTerms = ExtraTerms(),  # noqa: B008  # a tuple
    activation: Activation = SILU,
    first_expert: int = 0,
    weighs_inputs: bool = False,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Sum over each token's experts of weight * down(silu(gate(x)) * up(x)), or with another
    activation: [T, H] in the type of x.

    Inputs and results of the activation are rounded to the type of x. Quantized weights must be
    packed on CUDA.

    Args:
        x: [T, H].
        experts: weights of the experts.
        choice: experts of each token, and their weights.
        biases: biases of both products; None for none.
        extra: extra terms that are added to the sum.
        activation: activation, gated or not.
        first_expert: expert id of the first of `experts`; selected experts that are not among them
            contribute nothing.
        weighs_inputs: whether weights multiply the experts' inputs instead of their outputs; not
            supported with biases.
        batch_invariant: whether a token's result must not depend, in any bit, on other tokens.
    """
    assert biases is None or not weighs_inputs, "biases are not weighted"
    options = (biases, extra, activation, first_expert, weighs_inputs, batch_invariant)
    return _FUSED_MOE.select(x)(x, experts, choice, *options)


__all__ = [
    "GELU",
    "SILU",
    "SQUARED_RELU",
    "Activation",
    "ExpertBiases",
    "ExpertChoice",
    "ExpertWeights",
    "Experts",
    "ExtraTerms",
    "fused_moe",
    "pack_quantized_experts",
]
