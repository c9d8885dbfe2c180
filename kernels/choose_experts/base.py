"""How a router's scores become a choice of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

Scoring = Literal["softmax", "sigmoid", "softmax of chosen", "sigmoid of chosen"]
"""Functions that make shares of scores; the last two rank experts by their scores."""


class ExpertChoice(NamedTuple):
    """Which experts each of T tokens takes."""

    expert_ids: torch.Tensor
    """[T, K] int64, an expert at most once per token; behind those that were chosen, those that
    every token takes."""
    weights: torch.Tensor
    """[T, K] fp32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """How tokens choose."""

    num_chosen: int
    """Experts of each token."""
    scoring: Scoring = "softmax"
    normalize: bool = False
    """Whether a token's weights are scaled to sum to one."""
    num_groups: int = 1
    """Groups of neighbours, of which all have as many experts."""
    num_chosen_groups: int = 1
    """Experts are chosen from these groups only, those with the largest sums of best shares."""
    num_summed: int = 2
    """How many best shares of a group make that sum."""
    scale: float = 1.0
    """Factor of the weights."""
    num_always: int = 0
    """Experts that every token takes, by numbers behind those that it chooses from."""
