"""Torch choice of experts."""

from __future__ import annotations

import torch

from kernels.choose_experts.base import ExpertChoice, Routing


def choose_experts(
    scores: torch.Tensor, bias: torch.Tensor | None, routing: Routing
) -> ExpertChoice:
    """Shares, the groups, the best of these, and their weights."""
    if routing.scoring == "softmax of chosen":
        chosen, expert_ids = scores.topk(routing.num_chosen, dim=-1)
        return ExpertChoice(expert_ids, chosen.softmax(dim=-1))
    shares = scores.sigmoid() if routing.scoring == "sigmoid" else scores.softmax(dim=-1)
    ranking = shares if bias is None else shares + bias
    if routing.num_chosen_groups < routing.num_groups:
        groups = ranking.view(len(ranking), routing.num_groups, -1)
        best = groups.topk(min(routing.num_summed, groups.shape[2]), dim=-1).values.sum(dim=-1)
        chosen = best.topk(routing.num_chosen_groups, dim=-1).indices
        is_left_out = torch.ones_like(best, dtype=torch.bool).scatter_(1, chosen, False)
        ranking = groups.masked_fill(is_left_out.unsqueeze(2), -torch.inf).flatten(1)
    expert_ids = ranking.topk(routing.num_chosen, dim=-1).indices
    weights = shares.gather(1, expert_ids)
    if routing.normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return ExpertChoice(expert_ids, weights * routing.scale)
