"""Configuration of a mixture of experts (MoE). Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from worker.models.config.schema import short


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig:
    """Experts of a model: their number, size, layers and routing."""

    num_experts: int
    top_k: int
    """Number of experts per token (top-k)."""
    intermediate_size: int
    """Intermediate size of an expert."""
    dense_layers: frozenset[int] = frozenset()
    """Layers with an MLP instead of experts."""
    normalize: bool = True
    """Whether the weights of a token's experts are normalized to sum to 1."""
    sigmoid: bool = False
    """Whether scores are sigmoids rather than a softmax over all experts."""
    has_bias: bool = False
    """Whether a per-expert bias is added to the scores for the choice of experts, but not for their
    weights."""
    num_groups: int = 1
    top_k_groups: int = 1
    """Number of groups from which experts are chosen: those with the largest sums of scores."""
    num_summed: int = 2
    """Number of largest scores that are summed per group."""
    block_size: int = 1
    """Number of consecutive tokens (a block in block diffusion) that choose among the same
    `block_capacity` experts."""
    block_capacity: int = 0
    """Number of experts per block: those with the largest scores over its tokens. 0 for all
    experts."""
    scale: float = 1.0
    """Factor applied to the weights of a token's experts."""
    score_cap: float | None = None
    """Soft cap of the router's outputs (by tanh); None if there is none."""
    shared_size: int = 0
    """Intermediate size of the shared expert, which all tokens use; 0 if there is none."""
    num_zero_experts: int = 0
    """Number of zero-computation experts, which return their input; they follow the other
    experts."""

    @property
    def num_scored(self) -> int:
        """Number of experts that the router scores."""
        return self.num_experts + self.num_zero_experts


def checked(config: MoeConfig, top_k_key: str = "num_experts_per_tok") -> MoeConfig:
    """Checks the numbers of experts and groups, and returns `config`; `top_k_key` is the key of
    `top_k`.

    Raises:
        ValueError: the number of experts is not a multiple of the number of groups, or a token uses
            more experts than there are.
    """
    if config.num_groups < 1 or config.num_experts % config.num_groups:
        raise ValueError(
            f"n_group {config.num_groups} in config.json does not divide num_experts "
            f"({config.num_experts}): make them consistent"
        )
    allowed = config.num_experts // config.num_groups * config.top_k_groups
    if not 1 <= config.top_k <= allowed:
        raise ValueError(
            f"{top_k_key} {config.top_k} in config.json must be in [1, {allowed}]: fix it"
        )
    return config


def listed_dense_layers(
    kinds: list[str] | None, num_layers: int, first: int | None, default: int = 1
) -> frozenset[int]:
    """Layers with an MLP; the others have experts.

    Args:
        kinds: `mlp_layer_types`, "dense" or "sparse" for each layer; None if it is missing.
        num_layers: number of layers.
        first: `first_k_dense_replace`, number of leading dense layers; None if it is missing.
        default: number of leading dense layers if both are missing.

    Raises:
        ValueError: `kinds` is malformed, or the keys disagree.
    """
    leading = frozenset(range(min(num_layers, default if first is None else first)))
    if kinds is None:
        return leading
    if len(kinds) != num_layers or any(kind not in ("dense", "sparse") for kind in kinds):
        raise ValueError(
            f"mlp_layer_types = {short(kinds)} in config.json is not supported: it must have dense "
            f"or sparse for each of the {num_layers} layers"
        )
    listed = frozenset(layer for layer, kind in enumerate(kinds) if kind == "dense")
    if first is not None and listed != leading:
        raise ValueError(
            f"mlp_layer_types and first_k_dense_replace {first} in config.json disagree: make them "
            "consistent"
        )
    return listed


class GroupedRouting(Protocol):
    """Keys of DeepSeek V3's experts, which several vendors have adopted."""

    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    n_shared_experts: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float


def grouped_experts(family: GroupedRouting, dense_layers: frozenset[int]) -> MoeConfig:
    """DeepSeek V3's experts: scored by sigmoids, with a bias for the selection, selected from
    the best groups."""
    return MoeConfig(
        num_experts=family.n_routed_experts,
        top_k=family.num_experts_per_tok,
        intermediate_size=family.moe_intermediate_size,
        dense_layers=dense_layers,
        normalize=family.norm_topk_prob,
        sigmoid=True,
        has_bias=True,
        num_groups=family.n_group,
        top_k_groups=family.topk_group,
        scale=family.routed_scaling_factor,
        shared_size=family.moe_intermediate_size * family.n_shared_experts,
    )
