"""Each token's experts, by a router's scores."""

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
    """The best experts of each token, the best first; which of equals is open.

    Args:
        scores: fp32 [T, E], rows may be strided.
        bias: fp32 [E], added to shares for the choice alone; None for none, as where experts are
            ranked by their scores.
        routing: how tokens choose.
        gate: fp32 [T, 1], rows may be strided: the sigmoid of it is the weight of experts that
            every token takes; None for 1.
        factors: fp32 [E], of the weights of those that are chosen; None for 1.
    """
    return _CHOOSE.select(scores)(scores, bias, routing, gate, factors)


__all__ = ["ExpertChoice", "Routing", "choose_experts"]
