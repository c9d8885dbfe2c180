"""The tensor-parallel group: collectives among the ranks that share one copy of a model."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

_STORE_FILE = "tensor_parallel_store"
_DEFAULT_TIMEOUT_S = 300.0


class TensorParallelGroup:
    """Collectives over NCCL (CUDA) or Gloo (CPU); nothing at all with one rank.

    All ranks call the same collectives in the same order. Ranks meet through a file in a directory
    that they share, so nothing listens beyond the loopback interface.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._process_group = process_group

    @classmethod
    def create(
        cls,
        rank: int,
        world_size: int,
        device: torch.device,
        directory: str | Path,
        *,
        timeout_s: float = _DEFAULT_TIMEOUT_S,
    ) -> TensorParallelGroup:
        """Joins the group; returns when all ranks have. The directory must be fresh per group.

        Raises:
            torch.distributed.DistError: the other ranks did not come within the timeout.
        """
        assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
        process_group = None
        if world_size > 1:
            store_file = Path(directory).resolve() / _STORE_FILE
            if device.type == "cpu":
                os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback_interface())
            dist.init_process_group(
                backend="nccl" if device.type == "cuda" else "gloo",
                init_method=store_file.as_uri(),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
                device_id=device if device.type == "cuda" else None,
            )
            process_group = dist.group.WORLD
        return cls(
            rank=rank,
            world_size=world_size,
            device=device,
            process_group=process_group,
        )

    @classmethod
    def alone(cls, device: torch.device) -> TensorParallelGroup:
        """A group of one rank; it never touches torch.distributed."""
        return cls(rank=0, world_size=1, device=device, process_group=None)

    def all_reduce(self, tensor: torch.Tensor, *, fixed_order: bool = False) -> torch.Tensor:
        """The sum over all ranks, [*tensor.shape] on each; may reuse the input's memory.

        With `fixed_order` an element's sum does not depend on its place in the message. The
        libraries' order does from three ranks on; of two ranks either order gives the same.
        """
        if self.world_size == 1:
            return tensor
        if fixed_order and self.world_size > 2:
            parts = self._gather(tensor)
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            return total
        dist.all_reduce(tensor, group=self._process_group)
        return tensor

    def all_gather_last_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        """All ranks' [..., n] side by side, in the order of ranks: [..., world_size * n]."""
        if self.world_size == 1:
            return tensor
        return torch.cat(self._gather(tensor), dim=-1)

    def close(self) -> None:
        """Leaves the group. Safe to call twice."""
        if self._process_group is not None:
            self._process_group = None
            dist.destroy_process_group()

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(parts, tensor.contiguous(), group=self._process_group)
        return parts


def _loopback_interface() -> str:
    return "lo0" if sys.platform == "darwin" else "lo"
