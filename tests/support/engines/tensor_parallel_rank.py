"""One rank of a small tensor-parallel run, in a separate process."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from tests.support.engines.plan_driver import Request, generate, make_runner
from worker.models.layers import symmetric_memory
from worker.models.layers import tensor_parallel as group_module
from worker.models.layers.tensor_parallel import TensorParallelGroup


def scenario(*, together: bool) -> list[list[Request]]:
    """Requests of several runs; all runs have the same first request."""
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, 500, 300).tolist()
    runs = []
    for run in range(2):
        probe = Request(prompt=tokens[:90], new_tokens=5, slot=run, temperature=0.7, seed=3)
        other = Request(prompt=tokens[100:], new_tokens=8, slot=5)
        runs.append([probe, other] if together and run else [probe])
    return runs


def run_rank(
    rank: int, world_size: int, folders: list[str], options: dict[str, object], directory: str
) -> None:
    """Runs every folder's scenario and saves all logits and tokens."""
    torch.set_num_threads(1)
    group = TensorParallelGroup.create(
        rank, world_size, torch.device("cpu"), directory, timeout_s=120
    )
    saved = []
    for folder in folders:
        runner = make_runner(folder, group, tensor_parallel_size=world_size, **options)
        for run, requests in enumerate(scenario(together=True)):
            generate(runner, requests, chunk=64 if run else 1024, page_seed=run)
            saved.append([(request.tokens, torch.stack(request.logits)) for request in requests])
    gathered = group.all_gather_last_dim(torch.full((2, 1), float(rank)))
    ordered = group.all_reduce(torch.full((3,), rank + 0.1), fixed_order=True)
    torch.save((saved, gathered, ordered), Path(directory) / f"rank{rank}.pt")
    group.close()
    group.close()


def run_rank_on_shared_device(rank: int, device_names: list[str], directory: str) -> None:
    """Runs a group of CUDA ranks with CUDA device names, but with tensors on CPU; saves what it
    gathers."""
    torch.set_num_threads(1)
    group_module._device_name = lambda device: device_names[rank]
    world_size = len(device_names)
    group = TensorParallelGroup.create(
        rank, world_size, torch.device("cuda", 0), directory, timeout_s=120
    )
    total = group.all_reduce(torch.full((3,), rank + 0.5, dtype=torch.bfloat16))
    side_by_side = group.all_gather_last_dim(torch.full((2, 1), float(rank)))
    together = group.gather_on_device([rank, 10 * rank])
    torch.save((total, side_by_side, together), Path(directory) / f"rank{rank}.pt")
    group.close()


def run_rank_without_symmetric_memory(rank: int, function: str, directory: str) -> None:
    """Creates symmetric memory for two ranks, of which rank 1 fails in this function of torch's;
    saves the outcome, and whether this rank began the rendezvous."""
    timeout = timedelta(seconds=120)
    store = dist.FileStore(f"{directory}/store", 2)  # type: ignore[attr-defined]  # lacks __all__
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    group = dist.group.WORLD
    assert group is not None
    own_store = dist.distributed_c10d._get_process_group_store(group)
    begun = []

    def fail_in(name: str) -> None:
        if (rank, name) == (1, function):
            raise RuntimeError("no peer access")

    def empty(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        fail_in("empty")
        return torch.empty(size, dtype=dtype, device=device)

    def rendezvous(buffer: torch.Tensor, group_name: str) -> SimpleNamespace:
        """Exchanges requests through the group's store, as torch does."""
        begun.append(len(buffer))
        fail_in("rendezvous")
        own_store.set(f"request{rank}", "")
        own_store.wait([f"request{1 - rank}"])
        return SimpleNamespace(multicast_ptr=0)

    with (
        patch.object(torch.cuda, "get_device_capability", lambda device: (9, 0)),
        patch.object(symm_mem, "empty", empty),
        patch.object(symm_mem, "rendezvous", rendezvous),
        patch.object(symmetric_memory, "_RENDEZVOUS_TIMEOUT", timedelta(seconds=0.5)),
    ):
        memory = symmetric_memory.create_symmetric_memory(
            group, torch.device("cpu"), store, timeout
        )
    total = torch.full((3,), rank + 1.0)
    dist.all_reduce(total)
    torch.save((memory is None, len(begun), total), Path(directory) / f"rank{rank}.pt")
    dist.destroy_process_group()
