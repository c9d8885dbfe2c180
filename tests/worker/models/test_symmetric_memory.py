"""All-reduces over symmetric memory: which ones use it, and when NCCL is used instead.

Ranks are threads. The library's functions are stand-ins with its signatures.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from worker.models.layers import symmetric_memory, tensor_parallel
from worker.models.layers.symmetric_memory import (
    SMALL_BYTES,
    SymmetricMemory,
    create_symmetric_memory,
    max_bytes,
)
from worker.models.layers.tensor_parallel import TensorParallelGroup

CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=300)
HOPPER = 9


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
        self.fails_in = ""
        """Name of the function that fails there."""
        self.store = dist.HashStore()
        self._parts: list[torch.Tensor] = [torch.empty(0)] * size
        self._barrier = threading.Barrier(size, timeout=20)
        self._rendezvous = threading.Barrier(size, timeout=0.5)

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
        self._fail("empty")
        buffer = torch.empty(*size, dtype=dtype, device=device)
        self.buffers.add(buffer.untyped_storage().data_ptr())
        return buffer

    def rendezvous(self, tensor: torch.Tensor, group: Any) -> Any:
        self.calls.append("rendezvous")
        assert tensor.untyped_storage().data_ptr() in self.buffers
        self._fail("rendezvous")
        self._rendezvous.wait()
        return SimpleNamespace(multicast_ptr=self.multicast_ptr)

    def one_shot(
        self, input: torch.Tensor, reduce_op: str, group_name: str, out: torch.Tensor
    ) -> torch.Tensor:
        self.calls.append("one-shot")
        return out.copy_(self._sum(input, reduce_op, group_name))

    def two_shot(
        self, input: torch.Tensor, reduce_op: str, group_name: str, output: torch.Tensor
    ) -> torch.Tensor:
        self.calls.append("two-shot")
        return output.copy_(self._sum(input, reduce_op, group_name))

    def multimem(self, input: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
        self.calls.append("multimem")
        return input.copy_(self._sum(input, reduce_op, group_name))

    def _fail(self, function: str) -> None:
        if self.own.rank == self.failing_rank and function == self.fails_in:
            raise RuntimeError("no peer access")

    def _sum(self, input: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
        if input.dtype not in (torch.bfloat16, torch.float32):  # AT_DISPATCH_FLOAT_AND_BFLOAT16
            raise RuntimeError(f"not implemented for {input.dtype}")
        assert input.untyped_storage().data_ptr() in self.buffers, "peers cannot read it"
        assert (reduce_op, group_name) == ("sum", "the group")
        total = self.exchange(input).float().sum(0)
        return total + (self.own.rank == self.broken_rank)


@pytest.fixture(params=[2])
def node(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Node:
    node = Node(request.param)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (HOPPER, 0))
    monkeypatch.setattr(dist, "all_reduce", node.nccl)
    monkeypatch.setattr(symm_mem, "empty", node.empty)
    monkeypatch.setattr(symm_mem, "rendezvous", node.rendezvous)
    monkeypatch.setattr(torch.ops.symm_mem, "one_shot_all_reduce_out", node.one_shot)
    monkeypatch.setattr(torch.ops.symm_mem, "two_shot_all_reduce_out", node.two_shot)
    monkeypatch.setattr(torch.ops.symm_mem, "multimem_all_reduce_", node.multimem)
    return node


def test_the_library_has_these_signatures() -> None:
    one_shot = torch.ops.symm_mem.one_shot_all_reduce_out.default._schema
    two_shot = torch.ops.symm_mem.two_shot_all_reduce_out.default._schema
    multimem = torch.ops.symm_mem.multimem_all_reduce_.default._schema
    assert [one.name for one in one_shot.arguments] == ["input", "reduce_op", "group_name", "out"]
    assert [one.name for one in two_shot.arguments] == [
        *("input", "reduce_op", "group_name", "output")
    ]
    assert [one.name for one in multimem.arguments] == ["input", "reduce_op", "group_name"]
    assert hasattr(torch._C._distributed_c10d._SymmetricMemory, "multicast_ptr")


def created(node: Node) -> list[SymmetricMemory | None]:
    return node.on_ranks(lambda group: create_symmetric_memory(group, CPU, node.store, TIMEOUT))


def reduced(node: Node, memory: list[SymmetricMemory | None], *shape: int, dtype: Any) -> list[str]:
    """Methods used by a sum, which must be right on both ranks."""

    def work(group: Any) -> torch.Tensor:
        rank = group.rank()
        ranks = TensorParallelGroup(
            rank=rank,
            world_size=node.size,
            device=CPU,
            process_group=group,
            symmetric_memory=memory[rank],
        )
        return ranks.all_reduce(torch.full(shape, rank + 1.0, dtype=dtype))

    node.calls.clear()
    for total in node.on_ranks(work):
        assert total.shape == shape
        assert (total == sum(range(1, node.size + 1))).all()
    return sorted(set(node.calls))


@pytest.mark.parametrize(("node", "kernel"), [(2, "two-shot"), (4, "multimem")], indirect=["node"])
def test_the_kernel_depends_on_size_and_ranks(
    node: Node, kernel: str, caplog: pytest.LogCaptureFixture
) -> None:
    node.multicast_ptr = 4096
    caplog.set_level("INFO")
    memory = created(node)
    assert None not in memory
    assert f"one-shot, {kernel} above 256 KiB" in caplog.text
    half, single = torch.bfloat16, torch.float32
    assert reduced(node, memory, 4, 4096, dtype=half) == ["one-shot"]
    assert reduced(node, memory, SMALL_BYTES // 4, dtype=single) == ["one-shot"]
    assert reduced(node, memory, SMALL_BYTES // 4 + 4, dtype=single) == [kernel]
    assert reduced(node, memory, 128, 8192, dtype=half) == [kernel]


def test_limits_by_ranks_and_capability() -> None:
    mib = 1 << 20
    assert [max_bytes(HOPPER, ranks) // mib for ranks in (2, 4, 8)] == [64, 32, 64]
    assert max_bytes(8, 4) == max_bytes(12, 2) == SMALL_BYTES, "without multicast"


def test_without_multicast_large_sums_go_through_nccl(node: Node) -> None:
    memory = created(node)
    assert reduced(node, memory, SMALL_BYTES // 4, dtype=torch.float32) == ["one-shot"]
    assert reduced(node, memory, SMALL_BYTES // 4 + 4, dtype=torch.float32) == ["nccl"]


@pytest.mark.parametrize(
    ("count", "dtype"), [(7, torch.float32), (8, torch.int64), (8, torch.float16)], ids=str
)
def test_sums_without_a_kernel_go_through_nccl(node: Node, count: int, dtype: torch.dtype) -> None:
    node.multicast_ptr = 4096
    assert reduced(node, created(node), count, dtype=dtype) == ["nccl"]


@pytest.mark.parametrize("rank", [0, 1])
def test_wrong_sums_are_found_at_the_start(
    node: Node, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    node.broken_rank = rank
    assert created(node) == [None, None]
    assert "its results differ from NCCL's" in caplog.text


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("function", ["empty", "rendezvous"])
def test_if_a_rank_fails_all_use_nccl(
    node: Node, rank: int, function: str, caplog: pytest.LogCaptureFixture
) -> None:
    node.failing_rank, node.fails_in = rank, function
    assert created(node) == [None, None]
    assert "symmetric memory is unavailable" in caplog.text
    assert ("no peer access" in caplog.text) == (rank == 0), "rank 0 logs its own error"
    # No rank waits in the rendezvous for one that has no buffer.
    assert ("rendezvous" in node.calls) == (function == "rendezvous")
    assert reduced(node, [None, None], 8, dtype=torch.float32) == ["nccl"]


def test_ranks_that_no_kernel_sums_in_order_use_nccl(node: Node) -> None:
    assert 3 not in symmetric_memory._WORLD_SIZES
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 3, group_name="the group")
    assert create_symmetric_memory(group, CPU, dist.HashStore(), TIMEOUT) is None
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

    def create(group: object, device: torch.device, *_: object) -> object:
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
