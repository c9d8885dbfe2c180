"""Choice of experts for each token, by a router's scores."""

from __future__ import annotations

import torch

from kernels.choose_experts import reference
from kernels.choose_experts.base import ExpertChoice, Routing
from kernels.registry import registry

_CHOOSE = registry.register(
    "choose_experts",
    reference.choose_experts,
    triton="kernels.choose_experts.triton_kernel:choose_experts",
)


def choose_experts(
    scores: torch.Tensor,
    bias: torch.Tensor | None,
    routing: Routing,
    gate: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> ExpertChoice:
    """Top-k experts of each token with their weights, best first; ties are broken arbitrarily.

    Args:
        scores: fp32 [T, E]: the router's scores; rows may be strided.
        bias: fp32 [E], added to probabilities for the selection only; None for none. Must be None
            if experts are ranked by their scores ("... of chosen").
        routing: scoring, groups and numbers of experts.
        gate: fp32 [T, 1]: its sigmoid is the weight of shared experts; rows may be strided. None
            for a weight of 1.
        factors: fp32 [E]: factors of the selected experts' weights; None for 1.
    """
    return _CHOOSE.select(scores)(scores, bias, routing, gate, factors)


__all__ = ["ExpertChoice", "Routing", "choose_experts"]
