"""Routing: parameters of the choice of experts, and its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

Scoring = Literal["softmax", "sigmoid", "softmax of chosen", "sigmoid of chosen"]
"""Functions from scores to weights. "softmax" and "sigmoid" apply to all experts, which are ranked
by probability. With the other two, experts are ranked by score, and the function only applies to
the selected ones."""


class ExpertChoice(NamedTuple):
    """Experts of T tokens, K each."""

    expert_ids: torch.Tensor
    """int64 [T, K]: selected experts, distinct per token, followed by shared experts."""
    weights: torch.Tensor
    """fp32 [T, K]: weights of the experts' outputs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """Parameters of the choice of experts."""

    top_k: int
    """Number of selected experts per token."""
    scoring: Scoring = "softmax"
    normalize: bool = False
    """Whether a token's weights are normalized to sum to 1."""
    num_groups: int = 1
    """Number of groups of consecutive experts, all of the same size."""
    top_k_groups: int = 1
    """Number of groups from which experts are selected: those with the largest sums of
    probabilities."""
    num_summed: int = 2
    """Number of largest probabilities per group whose sum ranks the groups."""
    block_size: int = 1
    """Number of consecutive tokens whose experts are selected among the same `block_capacity` ones;
    T is a multiple of it."""
    block_capacity: int = 0
    """Number of experts per block: those to which any of its tokens gives the largest
    probabilities; ties select the first ones. 0 selects among all experts."""
    scale: float = 1.0
    """Factor by which the weights are multiplied."""
    num_always: int = 0
    """Number of shared experts, which all tokens use; their ids follow those of routed experts."""
