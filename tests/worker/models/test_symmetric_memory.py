"""Small all-reduces over symmetric memory: which ones use it, and when NCCL is used instead.

Ranks are threads. The library's functions are stand-ins with its signatures.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from worker.models.layers import symmetric_memory, tensor_parallel
from worker.models.layers.symmetric_memory import (
    MOST_BYTES,
    SymmetricMemory,
    create_symmetric_memory,
)
from worker.models.layers.tensor_parallel import TensorParallelGroup

CPU = torch.device("cpu")


class Node:
    """Two ranks, the values that they exchange, and the methods of their sums."""

    def __init__(self, size: int = 2) -> None:
        self.size = size
        self.own = threading.local()
        self.calls: list[str] = []
        self.buffers: set[int] = set()
        """Storages that peers can read."""
        self.multicast_ptr = 0
        self.broken_rank: int | None = None
        """Rank whose kernel computes wrong sums."""
        self.failing_rank: int | None = None
        """Rank whose driver fails."""
        self._parts: list[torch.Tensor] = [torch.empty(0)] * size
        self._barrier = threading.Barrier(size, timeout=20)

    def exchange(self, tensor: torch.Tensor) -> torch.Tensor:
        """Parts of all ranks, stacked."""
        self._parts[self.own.rank] = tensor.clone()
        self._barrier.wait()
        parts = torch.stack(self._parts)
        self._barrier.wait()
        return parts

    def on_ranks(self, work: Callable[[Any], Any]) -> list[Any]:
        """Results of each rank's thread, given its process group."""

        def run(rank: int) -> Any:
            self.own.rank = rank
            group = SimpleNamespace(
                rank=lambda: rank, size=lambda: self.size, group_name="the group"
            )
            return work(group)

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(run, range(self.size)))

    # Functions of torch.

    def nccl(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        parts = self.exchange(tensor)
        self.calls.append("nccl")
        tensor.copy_(parts.amin(0) if op == dist.ReduceOp.MIN else parts.float().sum(0))

    def empty(self, *size: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        buffer = torch.empty(*size, dtype=dtype, device=device)
        self.buffers.add(buffer.untyped_storage().data_ptr())
        return buffer

    def rendezvous(self, tensor: torch.Tensor, group: Any) -> Any:
        assert tensor.untyped_storage().data_ptr() in self.buffers
        if self.own.rank == self.failing_rank:
            raise RuntimeError("no peer access")
        return SimpleNamespace(multicast_ptr=self.multicast_ptr)

    def one_shot(
        self, input: torch.Tensor, reduce_op: str, group_name: str, out: torch.Tensor
    ) -> torch.Tensor:
        self.calls.append("one-shot")
        return out.copy_(self._sum(input, reduce_op, group_name))

    def multimem(self, input: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
        self.calls.append("multimem")
        return input.copy_(self._sum(input, reduce_op, group_name))

    def _sum(self, input: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
        assert input.untyped_storage().data_ptr() in self.buffers, "peers cannot read it"
        assert (reduce_op, group_name) == ("sum", "the group")
        total = self.exchange(input).float().sum(0)
        return total + (self.own.rank == self.broken_rank)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    node = Node()
    monkeypatch.setattr(dist, "all_reduce", node.nccl)
    monkeypatch.setattr(symm_mem, "empty", node.empty)
    monkeypatch.setattr(symm_mem, "rendezvous", node.rendezvous)
    monkeypatch.setattr(torch.ops.symm_mem, "one_shot_all_reduce_out", node.one_shot)
    monkeypatch.setattr(torch.ops.symm_mem, "multimem_all_reduce_", node.multimem)
    return node


def test_the_library_has_these_signatures() -> None:
    one_shot = torch.ops.symm_mem.one_shot_all_reduce_out.default._schema
    multimem = torch.ops.symm_mem.multimem_all_reduce_.default._schema
    assert [one.name for one in one_shot.arguments] == ["input", "reduce_op", "group_name", "out"]
    assert [one.name for one in multimem.arguments] == ["input", "reduce_op", "group_name"]
    assert hasattr(torch._C._distributed_c10d._SymmetricMemory, "multicast_ptr")


def created(node: Node) -> list[SymmetricMemory | None]:
    return node.on_ranks(lambda group: create_symmetric_memory(group, CPU))


def reduced(node: Node, memory: list[SymmetricMemory | None], *shape: int, dtype: Any) -> list[str]:
    """Methods used by a sum, which must be right on both ranks."""

    def work(group: Any) -> torch.Tensor:
        rank = group.rank()
        ranks = TensorParallelGroup(
            rank=rank,
            world_size=2,
            device=CPU,
            process_group=group,
            symmetric_memory=memory[rank],
        )
        return ranks.all_reduce(torch.full(shape, rank + 1.0, dtype=dtype))

    node.calls.clear()
    for total in node.on_ranks(work):
        assert total.shape == shape
        assert (total == 3.0).all()
    return sorted(set(node.calls))


@pytest.mark.parametrize(("multicast_ptr", "way"), [(0, "one-shot"), (4096, "multimem")])
def test_small_sums_go_over_symmetric_memory(node: Node, multicast_ptr: int, way: str) -> None:
    node.multicast_ptr = multicast_ptr
    memory = created(node)
    assert None not in memory
    half, single = torch.bfloat16, torch.float32
    assert reduced(node, memory, 4, 4096, dtype=half) == [way]
    assert reduced(node, memory, MOST_BYTES // 4, dtype=single) == [way]
    assert reduced(node, memory, 8, dtype=torch.float16) == ["one-shot"]


def test_other_sums_go_through_nccl(node: Node) -> None:
    memory = created(node)
    assert reduced(node, memory, MOST_BYTES // 4 + 4, dtype=torch.float32) == ["nccl"]
    assert reduced(node, memory, 7, dtype=torch.float32) == ["nccl"]
    assert reduced(node, memory, 8, dtype=torch.int64) == ["nccl"]


@pytest.mark.parametrize("rank", [0, 1])
def test_wrong_sums_are_found_at_the_start(
    node: Node, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    node.broken_rank = rank
    assert created(node) == [None, None]
    assert "its results differ from NCCL's" in caplog.text


@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_is_left_alone_with_what_its_peer_lacks(
    node: Node, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    node.failing_rank = rank
    assert created(node) == [None, None]
    assert ("no peer access" if rank == 0 else "failed on another rank") in caplog.text
    assert set(node.calls) == {"nccl"}
    assert reduced(node, [None, None], 8, dtype=torch.float32) == ["nccl"]


def test_ranks_that_no_kernel_sums_in_order_use_nccl(node: Node) -> None:
    assert 3 not in symmetric_memory._WORLD_SIZES
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 3, group_name="the group")
    assert create_symmetric_memory(group, CPU) is None
    assert not node.calls


@pytest.mark.parametrize(
    ("names", "backend"),
    [(("GPU-a", "GPU-b"), "nccl"), (("GPU-a", "GPU-a"), "gloo")],
    ids=["two", "one"],
)
def test_a_group_whose_ranks_have_gpus_of_their_own_makes_it(
    names: tuple[str, str], backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If they share a GPU, sums go through the host."""
    begun: list[str] = []
    made, world = object(), object()

    def begin(*, backend: str, **_: Any) -> None:
        begun.append(backend)

    def create(group: object, device: torch.device) -> object:
        assert (group, device.type) == (world, "cuda")
        return made

    monkeypatch.setattr(tensor_parallel, "_device_name", lambda _: names[0])
    monkeypatch.setattr(tensor_parallel, "_exchange", lambda *_: names)
    monkeypatch.setattr(tensor_parallel, "_choose_interface", lambda _: None)
    monkeypatch.setattr(tensor_parallel, "create_symmetric_memory", create)
    monkeypatch.setattr(dist, "init_process_group", begin)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=world))
    group = TensorParallelGroup.create(0, 2, torch.device("cuda", 0), tmp_path)
    assert begun == [backend]
    assert group._symmetric_memory is (made if backend == "nccl" else None)


def test_logits_are_gathered_into_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of parts would be copied again, part by part."""
    gathered: list[list[int]] = []

    def gather(parts: torch.Tensor, own: torch.Tensor, group: Any = None) -> None:
        gathered.append(list(parts.shape))
        parts.copy_(torch.cat((own, own + 100)))

    monkeypatch.setattr(dist, "all_gather_into_tensor", gather)
    ranks = TensorParallelGroup(rank=0, world_size=2, device=CPU, process_group=None)
    logits = ranks.all_gather_last_dim(torch.arange(6).view(3, 2))
    assert gathered == [[6, 2]]
    assert logits.tolist() == [[0, 1, 100, 101], [2, 3, 102, 103], [4, 5, 104, 105]]
