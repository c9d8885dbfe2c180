"""Choice of experts for each token, from a router's scores."""

from __future__ import annotations

import torch

from kernels import rowwise
from kernels.choose_experts.base import ExpertChoice, Routing
from kernels.registry import op


@op
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
        bias: fp32 [E], added to probabilities only for the selection; None if unused. Must be None
            if experts are ranked by score, as with "softmax of chosen" and "sigmoid of chosen".
        routing: scoring, groups and numbers of experts.
        gate: fp32 [T, 1]: its sigmoid is the weight of shared experts; rows may be strided. None if
            that weight is 1.
        factors: fp32 [E]: factors by which the weights of selected experts are multiplied; None if
            all are 1.
    """
    choice, (num_tokens, count) = _choose(scores, bias, routing), scores.shape
    if factors is not None:
        choice = choice._replace(weights=choice.weights * factors[choice.expert_ids])
    if not routing.num_always:
        return choice
    always = torch.arange(count, count + routing.num_always, device=scores.device)
    weight = torch.ones_like(choice.weights[:, :1]) if gate is None else rowwise.sigmoid(gate)
    return ExpertChoice(
        torch.cat((choice.expert_ids, always.expand(num_tokens, -1)), dim=1),
        torch.cat((choice.weights, weight.expand(-1, routing.num_always)), dim=1),
    )


def _choose(scores: torch.Tensor, bias: torch.Tensor | None, routing: Routing) -> ExpertChoice:
    """Selected experts, without shared ones, with their weights."""
    if routing.scoring in ("softmax of chosen", "sigmoid of chosen"):
        chosen, expert_ids = scores.topk(routing.top_k, dim=-1)
        is_softmax = routing.scoring == "softmax of chosen"
        weights = chosen.softmax(dim=-1) if is_softmax else rowwise.sigmoid(chosen)
        return ExpertChoice(expert_ids, weights * routing.scale)
    shares = rowwise.sigmoid(scores) if routing.scoring == "sigmoid" else scores.softmax(dim=-1)
    ranking = shares if bias is None else shares + bias
    if routing.block_capacity:
        is_left_out = ~experts_of_blocks(ranking, routing)
        ranking = ranking.masked_fill(
            is_left_out.repeat_interleave(routing.block_size, dim=0), -torch.inf
        )
    if routing.top_k_groups < routing.num_groups:
        groups = ranking.view(len(ranking), routing.num_groups, -1)
        best = groups.topk(min(routing.num_summed, groups.shape[2]), dim=-1).values.sum(dim=-1)
        chosen = best.topk(routing.top_k_groups, dim=-1).indices
        is_left_out = torch.ones_like(best, dtype=torch.bool).scatter_(1, chosen, False)
        ranking = groups.masked_fill(is_left_out.unsqueeze(2), -torch.inf).flatten(1)
    expert_ids = ranking.topk(routing.top_k, dim=-1).indices
    weights = shares.gather(1, expert_ids)
    if routing.normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return ExpertChoice(expert_ids, weights * routing.scale)


def experts_of_blocks(ranking: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Flags, bool [T / block_size, E], of the experts from which the tokens of each block select,
    as in LLaDA 2.2.

    Args:
        ranking: fp32 [T, E]: probabilities plus bias.
        routing: routing with blocks.
    """
    count = ranking.shape[1]
    best = ranking.view(-1, routing.block_size, count).amax(dim=1)
    order = best.argsort(dim=-1, descending=True, stable=True)
    flags = torch.zeros_like(best, dtype=torch.bool)
    return flags.scatter_(1, order[:, : routing.block_capacity], True)


__all__ = ["ExpertChoice", "Routing", "choose_experts", "experts_of_blocks"]
