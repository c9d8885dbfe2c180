"""A rank's share of a layer's experts: some columns of every one, or some of them whole."""

from __future__ import annotations

from dataclasses import dataclass

from worker.models.linear import divide
from worker.models.linear_method import LayerOptions
from worker.models.moe_config import MoeConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertShare:
    """One rank's share of experts."""

    first: int
    """The first expert that is here."""
    count: int
    """How many are."""
    start: int
    """The first column here, of each expert's gate."""
    size: int
    """How many there are."""
    is_whole: bool
    """Whether experts are here whole, and others not at all."""

    def cut(self, dim: int, start: int) -> tuple[int, int]:
        """The dimension of a checkpoint's tensor of all experts that ranks share, and the first
        index here: the experts, or what is given for the columns."""
        return (0, self.first) if self.is_whole else (dim, start)


def share_experts(moe: MoeConfig, options: LayerOptions) -> ExpertShare:
    """The share of this rank.

    Raises:
        ValueError: the ranks cannot share experts, or their columns, evenly.
    """
    group, count, size = options.group, moe.num_experts, moe.intermediate_size
    if not options.expert_parallel:
        own = divide(size, group.world_size, "the size of an expert")
        return ExpertShare(first=0, count=count, start=group.rank * own, size=own, is_whole=False)
    if count % group.world_size:
        raise ValueError(
            f"--tensor-parallel-size {group.world_size} does not divide the number of experts "
            f"({count}): choose a size that does, or leave out --enable-expert-parallel"
        )
    own = count // group.world_size
    return ExpertShare(first=group.rank * own, count=own, start=0, size=size, is_whole=True)
