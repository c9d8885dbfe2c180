"""Torch reference of the fused mixture of experts, computed expert by expert."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from kernels import rowwise
from kernels.activation.base import SILU, Activation
from kernels.choose_experts.base import ExpertChoice
from kernels.fused_moe.base import ExpertBiases, Experts, ExtraTerms
from kernels.registry import op

_TILE = 16


@op
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
    activation: [T, H] in the dtype of x.

    Inputs and results of the activation are rounded to the dtype of x. Quantized weights must be
    packed on CUDA.

    Args:
        x: [T, H]: inputs.
        experts: weights of the experts.
        choice: experts of each token, and their weights.
        biases: biases of the experts' projections; None if unused.
        extra: extra terms that are added to the sum.
        activation: activation, gated or not.
        first_expert: expert id of the first of `experts`; selected experts that are not among them
            contribute nothing.
        weighs_inputs: whether the weights are applied to the experts' inputs instead of their
            outputs; not supported with biases.
        batch_invariant: whether a token's result must be bitwise independent of other tokens.
    """
    # Adds up experts in ascending order of their ids; always batch-invariant.
    # HAZARD(invariance): matmuls with another number of rows round differently, so all have exactly
    # `_TILE` rows; the last tile is padded with zeros.
    assert biases is None or not weighs_inputs, "biases are not weighted"
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    counts = torch.bincount(choice.expert_ids.flatten())
    for expert in counts.nonzero().flatten().tolist():
        number = expert - first_expert
        if not 0 <= number < len(experts.down.values):
            continue
        gate_up, down = (weights.of(number, x.dtype) for weights in experts)
        tokens, choices = torch.nonzero(choice.expert_ids == expert, as_tuple=True)
        rows = x.index_select(0, tokens)
        weights = choice.weights[tokens, choices].unsqueeze(1)
        if weighs_inputs:
            rows = rows * weights.to(x.dtype)
        padded = torch.nn.functional.pad(rows, (0, 0, 0, -len(tokens) % _TILE))
        first, second = (None, None) if biases is None else (bias[number] for bias in biases)
        parts = [
            linear(activation(linear(tile, gate_up, first)), down, second)
            for tile in padded.view(-1, _TILE, x.shape[1]).unbind()
        ]
        result = torch.cat(parts)[: len(tokens)].float()
        total.index_add_(0, tokens, result if weighs_inputs else result * weights)
    return _add(total.to(x.dtype), x, choice, extra)


def _add(
    routed: torch.Tensor, x: torch.Tensor, choice: ExpertChoice, extra: ExtraTerms
) -> torch.Tensor:
    """Adds the terms of `extra` one after another, and rounds after each."""
    if extra.first_zero_expert is not None:
        is_zero = choice.expert_ids >= extra.first_zero_expert
        routed = routed + x * (choice.weights * is_zero).sum(dim=-1, keepdim=True).to(x.dtype)
    if extra.shared is None:
        return routed
    if extra.gate is None:
        return routed + extra.shared
    return routed + extra.shared * rowwise.sigmoid(extra.gate).to(x.dtype)
