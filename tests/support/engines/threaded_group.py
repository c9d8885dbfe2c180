"""Two ranks in one process: threads that exchange tensors at a barrier, because processes take
seconds to start."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from worker.models.layers.tensor_parallel import TensorParallelGroup

Outcome = TypeVar("Outcome")
_TIMEOUT_S = 60.0


class ThreadedGroup(TensorParallelGroup):
    """One thread's rank of a group on CPU."""

    def __init__(self, rank: int, parts: list[torch.Tensor], barrier: threading.Barrier) -> None:
        super().__init__(
            rank=rank,
            world_size=len(parts),
            device=torch.device("cpu"),
            process_group=None,
        )
        self._parts, self._barrier = parts, barrier

    def all_reduce(self, tensor: torch.Tensor, *, fixed_order: bool = False) -> torch.Tensor:
        """Sums in place, in rank order."""
        total, *others = self._gather(tensor)
        for part in others:
            total = total + part
        return total

    def _gather_into(self, parts: torch.Tensor, own: torch.Tensor) -> None:
        parts.copy_(torch.cat(self._gather(own)))

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._parts[self.rank] = tensor.clone()
        self._barrier.wait(_TIMEOUT_S)
        parts = list(self._parts)
        self._barrier.wait(_TIMEOUT_S)
        return parts


def run_ranks(world_size: int, work: Callable[[TensorParallelGroup], Outcome]) -> list[Outcome]:
    """Results of each rank's work, in rank order. An error in one rank also stops the others."""
    parts, barrier = [torch.empty(0)] * world_size, threading.Barrier(world_size)

    def run(rank: int) -> Outcome:
        try:
            return work(ThreadedGroup(rank, parts, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))
