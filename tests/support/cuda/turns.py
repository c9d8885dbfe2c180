"""A worker group on tensors that are nowhere: its ranks take turns, and wait for none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from tests.support.cuda.ranks import RanksHere
from tests.support.cuda.tensors import DEVICE
from tests.support.cuda.variants import Variants
from worker.config import EngineConfig
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.rank.rank import Rank

R = TypeVar("R")


class EmptyGroup(TensorParallelGroup):
    """One rank's view. What collectives yield has a shape, and no content that peers would add."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank=rank, world_size=size, device=DEVICE, process_group=None)

    def all_reduce(self, tensor: torch.Tensor, *, fixed_order: bool = False) -> torch.Tensor:
        """The sum, in place."""
        return tensor

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [torch.empty_like(tensor) for _ in range(self.world_size)]

    def _gather_into(self, parts: torch.Tensor, own: torch.Tensor) -> None:
        pass


class TurnsExecutor(RanksHere):
    """One rank after another does what is asked; what each launches is noted as its own."""

    def __init__(
        self, variants: Variants, config: EngineConfig, directory: str, spawn: Sequence[int]
    ) -> None:
        super().__init__(config, config.tensor_parallel_size)
        self._variants = variants

    def join(self, number: int) -> TensorParallelGroup:
        return EmptyGroup(number, len(self._ranks))

    def each(self, work: Callable[[Rank, int], R]) -> list[R]:
        results = list[R]()
        for number, rank in enumerate(self._ranks):
            self._variants.rank = number
            results.append(work(rank, number))
        self._variants.rank = 0  # which is asked for drafts and results
        return results
