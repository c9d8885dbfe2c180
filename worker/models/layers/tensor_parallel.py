"""Tensor-parallel group: collectives among the ranks of one model replica."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from worker.models.layers.symmetric_memory import SymmetricMemory, create_symmetric_memory
from worker.plan.rendezvous import Rendezvous, interface_towards

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_STORE_FILE = "tensor_parallel_store"
_DEFAULT_TIMEOUT_S = 300.0
_ARRIVAL_POLL_S = 0.02
_CLOSE_TIMEOUT_S = 5.0
"""Seconds to wait for a group to shut down before it is considered hung."""


class TensorParallelGroup:
    """Collectives over NCCL (CUDA) or Gloo (CPU); no-ops with one rank.

    NCCL needs one GPU per rank: if ranks share one, all collectives go through host memory and
    Gloo, which is slow but works. All ranks must call the same collectives in the same order. Ranks
    of one node rendezvous through a file in a shared directory and only listen on the loopback
    interface; ranks of several nodes rendezvous over the network.

    Args:
        rank: index of this rank.
        world_size: number of ranks.
        device: this rank's device.
        process_group: torch's process group; None with one rank.
        device_names: names of the ranks' devices, in order; equal names mean the same device. None
            on CPU.
        symmetric_memory: symmetric memory for all-reduces that it supports; None if unavailable.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        process_group: dist.ProcessGroup | None,
        device_names: Sequence[str] | None = None,
        symmetric_memory: SymmetricMemory | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._process_group = process_group
        self._device_names = device_names
        self._symmetric_memory = symmetric_memory
        self.is_through_host = device_names is not None and not _all_differ(device_names)
        """Whether collectives of a CUDA device go through host memory, which synchronizes with the
        device."""

    @classmethod
    def create(
        cls,
        rank: int,
        world_size: int,
        device: torch.device,
        directory: str | Path,
        *,
        timeout_s: float = _DEFAULT_TIMEOUT_S,
        while_waiting: Callable[[], None] | None = None,
        rendezvous: Rendezvous | None = None,
    ) -> TensorParallelGroup:
        """Joins a group; returns it once all ranks have joined.

        Args:
            rank: index of this rank.
            world_size: number of ranks.
            device: this rank's device.
            directory: directory that all ranks share; each group needs a new one.
            timeout_s: maximum time to wait for the other ranks, in seconds.
            while_waiting: called repeatedly until all ranks have joined; it may raise, since
                torch's wait does not detect that a rank has exited.
            rendezvous: used instead of the directory if the ranks are on several nodes.

        Raises:
            torch.distributed.DistError: not all ranks joined within the timeout.
        """
        assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
        if world_size == 1:
            return cls.alone(device)
        timeout = timedelta(seconds=timeout_s)
        store = _open_store(directory, rendezvous, rank, world_size, timeout)
        store.set(_arrival(rank), "")
        if while_waiting is not None:
            _await_all(store, world_size, while_waiting)
        names = None
        if device.type == "cuda":
            names = _exchange(store, _device_name(device), rank, world_size)
        over_nccl = names is not None and _all_differ(names)
        _choose_interface(rendezvous)
        dist.init_process_group(
            backend="nccl" if over_nccl else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device if over_nccl else None,
        )
        group, memory = dist.group.WORLD, None
        if over_nccl and rendezvous is None:  # all GPUs are on one node
            assert group is not None, "the group was just made"
            memory = create_symmetric_memory(group, device, store, timeout)
        return cls(
            rank=rank,
            world_size=world_size,
            device=device,
            process_group=group,
            device_names=names,
            symmetric_memory=memory,
        )

    @classmethod
    def alone(cls, device: torch.device) -> TensorParallelGroup:
        """A group of one rank, which does not use torch.distributed."""
        return cls(rank=0, world_size=1, device=device, process_group=None)

    def all_reduce(self, tensor: torch.Tensor, *, fixed_order: bool = False) -> torch.Tensor:
        """Sums a tensor over all ranks; each rank gets the sum, which may reuse the tensor's
        memory.

        With `fixed_order`, ranks are added in order, so that an element's sum does not depend on
        its position in the tensor. In NCCL and Gloo, it depends on the position for three or more
        ranks.
        """
        if self.world_size == 1:
            return tensor
        total = tensor.cpu() if self.is_through_host else tensor
        if fixed_order and self.world_size > 2:
            parts = self._gather(total)
            total = parts[0]
            for part in parts[1:]:
                total = total + part
        elif self._symmetric_memory is not None and self._symmetric_memory.takes(total):
            self._symmetric_memory.all_reduce(total)
        else:
            dist.all_reduce(total, group=self._process_group)
        return total.to(tensor.device)

    def all_gather_last_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenates all ranks' tensors [..., n] to [..., world_size * n], in the order of
        ranks."""
        if self.world_size == 1:
            return tensor
        local = tensor.cpu() if self.is_through_host else tensor
        # Gloo only gathers along the first dimension.
        parts = local.new_empty((self.world_size * local.shape[0], *local.shape[1:]))
        self._gather_into(parts, local.contiguous())
        parts = parts.view(self.world_size, *local.shape)
        return parts.movedim(0, -2).reshape(*local.shape[:-1], -1).to(tensor.device)

    def gather_on_device(self, values: Sequence[int]) -> list[list[int]]:
        """Values of all ranks that share this rank's device; only this rank's if there are no
        others.

        Acts as a barrier if ranks share devices. CUDA only.
        """
        if not self.is_through_host:
            return [list(values)]
        assert self._device_names is not None, "only named devices are shared"
        gathered = self._gather(torch.tensor(values))
        mine = self._device_names[self.rank]
        pairs = zip(self._device_names, gathered, strict=True)
        return [part.tolist() for name, part in pairs if name == mine]

    def close(self) -> bool:
        """Shuts down the group. Safe to call twice.

        NCCL may wait forever for peers that have exited or for graphs with its collectives, so this
        times out after a few seconds.

        Returns:
            Whether the group has shut down.
        """
        if self._process_group is None:
            return True
        self._process_group = self._symmetric_memory = None
        # A daemon thread: if the call never returns, the process can still exit.
        ending = threading.Thread(target=dist.destroy_process_group, daemon=True)
        ending.start()
        ending.join(_CLOSE_TIMEOUT_S)
        return not ending.is_alive()

    def _gather_into(self, parts: torch.Tensor, local: torch.Tensor) -> None:
        """Fills `parts` [world_size * n, ...] with all ranks' tensors [n, ...], in the order of
        ranks."""
        dist.all_gather_into_tensor(parts, local, group=self._process_group)

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(parts, tensor.contiguous(), group=self._process_group)
        return parts


def _arrival(rank: int) -> str:
    return f"rank_{rank}_is_here"


def _await_all(store: Store, world_size: int, while_waiting: Callable[[], None]) -> None:
    """Waits until all ranks have joined; meanwhile, calls `while_waiting`, which may raise."""
    arrivals = [_arrival(rank) for rank in range(world_size)]
    while not store.check(arrivals):
        while_waiting()
        time.sleep(_ARRIVAL_POLL_S)


def _open_store(
    directory: str | Path,
    rendezvous: Rendezvous | None,
    rank: int,
    world_size: int,
    timeout: timedelta,
) -> Store:
    """The key-value store of the rendezvous: a file for ranks on one node; for ranks on several
    nodes, rank 0 serves it."""
    store: Store
    if rendezvous is None:
        store_file = str(Path(directory).resolve() / _STORE_FILE)
        store = dist.FileStore(store_file, world_size)  # type: ignore[attr-defined]  # lacks __all__
    else:
        store = dist.TCPStore(  # type: ignore[attr-defined]  # lacks __all__
            rendezvous.host,
            rendezvous.store_port,
            is_master=rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=rendezvous.store_fd if rank == 0 else None,
        )
    store.set_timeout(timeout)
    return store


def _exchange(store: Store, word: str, rank: int, world_size: int) -> tuple[str, ...]:
    """Exchanges a string through the store; returns all ranks' strings in order. Raises DistError
    after the store's timeout."""
    store.set(f"device_of_rank_{rank}", word)
    return tuple(store.get(f"device_of_rank_{other}").decode() for other in range(world_size))


def _device_name(device: torch.device) -> str:
    """UUID of a GPU: unlike its index, it does not depend on the GPUs visible to a process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _all_differ(names: Sequence[str]) -> bool:
    return len(set(names)) == len(names)


def _choose_interface(rendezvous: Rendezvous | None) -> None:
    """Restricts collectives to the network interface that reaches the other ranks, unless the
    environment sets one."""
    interface = _loopback_interface() if rendezvous is None else interface_towards(rendezvous.host)
    if interface is not None:
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)


def _loopback_interface() -> str:
    return "lo0" if sys.platform == "darwin" else "lo"
