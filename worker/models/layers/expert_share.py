"""Expert share: a layer's experts on one rank, either columns of each or whole experts (expert
parallelism)."""

from __future__ import annotations

from dataclasses import dataclass

from worker.models.config.moe_config import MoeConfig
from worker.models.layers.linear_method import LayerOptions
from worker.models.layers.sharing import divide_experts


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertShare:
    """The experts, and their columns, that one rank holds."""

    first: int
    """Index of the first expert on this rank."""
    count: int
    """Number of experts on this rank."""
    start: int
    """Index of this rank's first column (intermediate dimension) of each expert."""
    size: int
    """Number of columns of each expert on this rank."""
    is_whole: bool
    """Whether the rank holds whole experts (expert parallelism) instead of columns of all."""

    def cut(self, dim: int, start: int) -> tuple[int, int]:
        """Dimension along which ranks shard a checkpoint's tensor [experts, ...], and this rank's
        first index in it: dimension 0 for whole experts, otherwise `dim` and `start`."""
        return (0, self.first) if self.is_whole else (dim, start)


def share_experts(moe: MoeConfig, options: LayerOptions) -> ExpertShare:
    """The expert share of this rank.

    Raises:
        ValueError: experts, or their columns, cannot be divided evenly among the ranks.
    """
    group, is_whole = options.group, options.expert_parallel
    count, size = divide_experts(moe, group.world_size, expert_parallel=is_whole)
    return ExpertShare(
        first=group.rank * count if is_whole else 0,
        count=count,
        start=0 if is_whole else group.rank * size,
        size=size,
        is_whole=is_whole,
    )
