"""Triton choice of experts: one program per token, with its experts in a tile [groups, experts]."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import rowwise
from kernels.choose_experts import ExpertChoice, Routing, choose_experts, experts_of_blocks
from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.registry import implements
from kernels.tiles import next_power_of_2


@implements(choose_experts, "triton")
def launch_choose_experts(
    scores: torch.Tensor,
    bias: torch.Tensor | None,
    routing: Routing,
    gate: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> ExpertChoice:
    """Launches one program per token, after torch ops that select the experts of blocks if their
    number is limited."""
    num_tokens, num_experts = scores.shape
    num_taken = routing.top_k + routing.num_always
    shape, device = (num_tokens, num_taken), scores.device
    expert_ids = torch.empty(shape, dtype=torch.int64, device=device)
    weights = torch.empty(shape, dtype=torch.float32, device=device)
    if num_tokens == 0:
        return ExpertChoice(expert_ids, weights)
    allowed = None
    if routing.block_capacity:
        assert routing.scoring == "sigmoid", "experts of blocks are ranked by sigmoids"
        shares = rowwise.sigmoid(scores)
        allowed = experts_of_blocks(shares if bias is None else shares + bias, routing)
    has_groups = routing.top_k_groups < routing.num_groups
    groups = routing.num_groups if has_groups else 1
    size = num_experts // groups
    blocks = next_power_of_2(groups), next_power_of_2(size)
    _choose_kernel[(num_tokens,)](
        scores, scores if bias is None else bias, expert_ids, weights,
        scores.stride(0), routing.scale,
        scores if gate is None else gate, 0 if gate is None else gate.stride(0),
        scores if factors is None else factors,
        scores if allowed is None else allowed,
        GROUPS=groups, SIZE=size, SCORING=routing.scoring, HAS_BIAS=bias is not None,
        NUM_CHOSEN_GROUPS=routing.top_k_groups if has_groups else 1,
        NUM_SUMMED=min(routing.num_summed, size), NUM_CHOSEN=routing.top_k,
        NUM_TAKEN=num_taken, HAS_GATE=gate is not None, HAS_FACTORS=factors is not None,
        TOKENS_PER_BLOCK=0 if allowed is None else routing.block_size,
        NORMALIZE=routing.normalize, BLOCK_GROUPS=blocks[0], BLOCK_SIZE=blocks[1],
        BLOCK_CHOSEN=next_power_of_2(num_taken),
        num_warps=1 if blocks[0] * blocks[1] <= 256 else 4,
    )  # fmt: skip
    return ExpertChoice(expert_ids, weights)


@dependent_kernel
def _choose_kernel(
    scores_ptr, bias_ptr, ids_ptr, weights_ptr, row_stride, scale, gate_ptr, gate_stride,
    factors_ptr, allowed_ptr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, SCORING: tl.constexpr, HAS_BIAS: tl.constexpr,
    NUM_CHOSEN_GROUPS: tl.constexpr, NUM_SUMMED: tl.constexpr, NUM_CHOSEN: tl.constexpr,
    NUM_TAKEN: tl.constexpr, HAS_GATE: tl.constexpr, HAS_FACTORS: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr, NORMALIZE: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_CHOSEN: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_GROUPS)[:, None]
    place = tl.arange(0, BLOCK_SIZE)[None, :]
    expert = group * SIZE + place
    exists = (group < GROUPS) & (place < SIZE)
    score = tl.load(scores_ptr + token * row_stride + expert, mask=exists, other=float("-inf"))
    share = score
    if SCORING == "sigmoid":
        share = 1.0 / (1.0 + tl.exp(-score))
    if SCORING == "softmax":
        power = tl.exp(score - tl.max(tl.max(score, axis=1), axis=0))
        share = power / tl.sum(tl.sum(power, axis=1), axis=0)
    ranking = share
    if HAS_BIAS:
        ranking += tl.load(bias_ptr + expert, mask=exists, other=0.0)
    if TOKENS_PER_BLOCK > 0:
        row = allowed_ptr + token // TOKENS_PER_BLOCK * (GROUPS * SIZE)
        exists = exists & (tl.load(row + expert, mask=exists, other=0) != 0)
    # NaN is ranked last, so that only existing experts are chosen.
    ranking = tl.where(exists & (ranking == ranking), ranking, float("-inf"))
    if NUM_CHOSEN_GROUPS < GROUPS:
        chosen = _best_groups(
            ranking, group < GROUPS, NUM_CHOSEN_GROUPS, NUM_SUMMED, BLOCK_GROUPS, BLOCK_SIZE
        )
        ranking = tl.where(chosen, ranking, float("-inf"))
    choice = tl.arange(0, BLOCK_CHOSEN)
    ids = tl.zeros((BLOCK_CHOSEN,), tl.int32)
    weights = tl.full((BLOCK_CHOSEN,), float("-inf"), tl.float32)
    for number in range(NUM_CHOSEN):
        best = tl.max(tl.max(ranking, axis=1), axis=0)
        candidates = tl.where(exists & (ranking == best), expert, GROUPS * SIZE)
        own = tl.min(tl.min(candidates, axis=1), axis=0)
        is_own = exists & (expert == own)
        weight = tl.sum(tl.sum(tl.where(is_own, share, 0.0), axis=1), axis=0)
        ids = tl.where(choice == number, own, ids)
        weights = tl.where(choice == number, weight, weights)
        ranking = tl.where(is_own, float("-inf"), ranking)
    weights = _scored(weights, choice, SCORING, NORMALIZE, NUM_CHOSEN)
    weights *= scale
    if HAS_FACTORS:
        weights *= tl.load(factors_ptr + ids, mask=choice < NUM_CHOSEN, other=0.0)
    if NUM_TAKEN > NUM_CHOSEN:
        always = 1.0
        if HAS_GATE:
            always = 1.0 / (1.0 + tl.exp(-tl.load(gate_ptr + token * gate_stride)))
        ids = tl.where(choice < NUM_CHOSEN, ids, GROUPS * SIZE + choice - NUM_CHOSEN)
        weights = tl.where(choice < NUM_CHOSEN, weights, always)
    cell = token * NUM_TAKEN + choice
    tl.store(ids_ptr + cell, ids.to(tl.int64), mask=choice < NUM_TAKEN)
    tl.store(weights_ptr + cell, weights, mask=choice < NUM_TAKEN)


@triton.jit
def _scored(
    weights, choice, SCORING: tl.constexpr, NORMALIZE: tl.constexpr, NUM_CHOSEN: tl.constexpr
):  # fmt: skip
    """Weights of the chosen experts: the scoring function over them, or normalization."""
    if SCORING == "softmax of chosen":
        weights = tl.exp(weights - tl.max(weights, axis=0))
        weights = weights / tl.sum(weights, axis=0)
    elif SCORING == "sigmoid of chosen":
        weights = 1.0 / (1.0 + tl.exp(-weights))
    elif NORMALIZE:
        total = tl.sum(tl.where(choice < NUM_CHOSEN, weights, 0.0), axis=0)
        weights = weights / (total + 1e-20)
    return weights


@triton.jit
def _best_groups(
    ranking, exists,
    NUM_CHOSEN: tl.constexpr, NUM_SUMMED: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Mask [BLOCK_GROUPS, 1] of the groups with the largest sums of their best probabilities."""
    group = tl.arange(0, BLOCK_GROUPS)[:, None]
    place = tl.arange(0, BLOCK_SIZE)[None, :]
    total = tl.zeros((BLOCK_GROUPS, 1), tl.float32)
    for _ in range(NUM_SUMMED):
        best = tl.max(ranking, axis=1)[:, None]
        first = tl.min(tl.where(ranking == best, place, BLOCK_SIZE), axis=1)[:, None]
        total += best
        ranking = tl.where(place == first, float("-inf"), ranking)
    total = tl.where(exists, total, float("-inf"))
    chosen = group < 0
    for _ in range(NUM_CHOSEN):
        best = tl.max(tl.max(total, axis=1), axis=0)
        candidates = tl.where(total == best, group, BLOCK_GROUPS)
        is_own = group == tl.min(tl.min(candidates, axis=1), axis=0)
        chosen = chosen | is_own
        total = tl.where(is_own, float("-inf"), total)
    return chosen
