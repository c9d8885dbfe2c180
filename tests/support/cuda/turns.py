"""A worker group on tensors without storage. Ranks run in turn, without waiting for each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from tests.support.cuda.ranks import RanksHere
from tests.support.cuda.tensors import DEVICE
from tests.support.cuda.variants import Variants
from worker.config import EngineConfig
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.protocol.messages import EngineInfo
from worker.rank.rank import Rank

R = TypeVar("R")


class EmptyGroup(TensorParallelGroup):
    """The group of one rank. Results of collectives have a shape, but no content from peers."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank=rank, world_size=size, device=DEVICE, process_group=None)

    def all_reduce(self, tensor: torch.Tensor, *, fixed_order: bool = False) -> torch.Tensor:
        """Sums in place."""
        return tensor

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [torch.empty_like(tensor) for _ in range(self.world_size)]

    def _gather_into(self, parts: torch.Tensor, own: torch.Tensor) -> None:
        pass


class TurnsExecutor(RanksHere):
    """Runs one rank after another; launches are recorded per rank."""

    def __init__(
        self, variants: Variants, config: EngineConfig, directory: str, spawn: Sequence[int]
    ) -> None:
        super().__init__(config, config.tensor_parallel_size)
        self._variants = variants

    def start(self) -> EngineInfo:
        info = super().start()
        for rank in self._ranks:
            rank._guard = None  # sampled tokens have no content, so ranks' tokens may differ
        return info

    def join(self, number: int) -> TensorParallelGroup:
        return EmptyGroup(number, len(self._ranks))

    def each(self, work: Callable[[Rank, int], R]) -> list[R]:
        results = list[R]()
        for number, rank in enumerate(self._ranks):
            self._variants.rank = number
            results.append(work(rank, number))
        self._variants.rank = 0  # its drafts and results are used
        return results
