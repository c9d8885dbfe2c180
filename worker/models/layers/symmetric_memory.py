"""Symmetric memory: all-reduces among the GPUs of one node, with kernels that access peer memory.

NCCL's latency is a large part of a decode step, which has two all-reduces of a few KiB per layer.
If GPUs can read each other's memory, each rank writes its input to a shared buffer, and one kernel
sums the inputs:

    one-shot    each rank reads all inputs: lowest latency, for small all-reduces
    two-shot    each rank reduces one slice, then reads the other slices: for two ranks
    multimem    each rank has the NVLink switch reduce one slice and store it on all ranks

All kernels end with a barrier, so that the next all-reduce may reuse the buffer. Every element is
summed in the order of ranks, or once for all ranks, so results are bitwise equal on all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)
R = TypeVar("R")

SMALL_BYTES = 256 << 10
"""Maximum size in bytes of a one-shot all-reduce, and of any all-reduce without multicast: vLLM's
limit for eight H100s (all_reduce_utils.py). We have not measured it."""
_MOST_BYTES = {
    9: {2: 64 << 20, 4: 32 << 20, 8: 64 << 20},
    10: {2: 8 << 20, 4: 32 << 20, 8: 128 << 20},
}
"""Maximum size in bytes of an all-reduce on GPUs with multicast, by major compute capability and
number of ranks. Above it, NCCL is faster in vLLM's measurements (all_reduce_utils.py). We have
not measured it."""
_ALIGNMENT = 16
"""Number of bytes that a kernel thread loads at once."""
_WORLD_SIZES = (2, 4, 8)
"""World sizes for which the one-shot kernel adds in the order of ranks."""
_DTYPES = (torch.bfloat16, torch.float32)
"""Data types that the kernels support."""
_TEST_COUNTS = (4, 1000 * 4, SMALL_BYTES // 4, SMALL_BYTES // 4 + 13 * 4)
"""Sizes, in units of 4 bytes, of the all-reduces that are compared with NCCL's. They cover the
one-shot kernel, the kernel for larger sizes, and slices of unequal size."""
_RENDEZVOUS_TIMEOUT = timedelta(seconds=30)
"""Maximum time to wait for ranks that fail during the rendezvous, which otherwise takes less than a
second."""


def max_bytes(capability: int, world_size: int) -> int:
    """Maximum size of an all-reduce on GPUs with multicast, in bytes.

    Args:
        capability: major compute capability of the GPUs.
        world_size: number of ranks.
    """
    return _MOST_BYTES.get(capability, {}).get(world_size, SMALL_BYTES)


class SymmetricMemory:
    """A buffer that all ranks of a group can read, and all-reduces in it.

    Args:
        group: NCCL process group.
        buffer: uint8 [maximum size of an all-reduce], allocated by `symm_mem.empty`, of the same
            size on all ranks.

    Raises:
        RuntimeError: the driver or the GPUs do not support it.
    """

    def __init__(self, group: ProcessGroup, buffer: torch.Tensor) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        self._group_name = group.group_name
        self._buffer = buffer
        self._handle = symm_mem.rendezvous(buffer, self._group_name)
        """Handle that keeps the peers' memory mapped."""
        has_multicast = bool(self._handle.multicast_ptr)
        self.max_bytes = len(buffer) if has_multicast else min(len(buffer), SMALL_BYTES)
        # With two ranks, multimem moves each element through a link 1.5 times, two-shot once.
        self._uses_switch = group.size() > 2

    @property
    def large_kernel(self) -> str:
        """Kernel of all-reduces above SMALL_BYTES; empty if NCCL runs them."""
        if self.max_bytes <= SMALL_BYTES:
            return ""
        return "multimem" if self._uses_switch else "two-shot"

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether `all_reduce` supports a tensor of this size, type and layout."""
        return (
            0 < tensor.nbytes <= self.max_bytes
            and tensor.nbytes % _ALIGNMENT == 0
            and tensor.dtype in _DTYPES
            and tensor.is_contiguous()
        )

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums over all ranks in place; the result is bitwise equal on all ranks."""
        values, group = tensor.view(-1), self._group_name
        part = self._buffer[: tensor.nbytes].view(tensor.dtype)
        # A kernel that also copies its input (one_shot_all_reduce_copy) lacks the barrier between
        # its threads' copies and the signal to the peers.
        part.copy_(values)
        if tensor.nbytes <= SMALL_BYTES:
            torch.ops.symm_mem.one_shot_all_reduce_out(part, "sum", group, values)
        elif self._uses_switch:
            torch.ops.symm_mem.multimem_all_reduce_(part, "sum", group)
            values.copy_(part)
        else:
            torch.ops.symm_mem.two_shot_all_reduce_out(part, "sum", group, values)
        return tensor


def create_symmetric_memory(
    group: ProcessGroup, device: torch.device, store: Store, timeout: timedelta
) -> SymmetricMemory | None:
    """Creates symmetric memory for a group after comparing its all-reduces with NCCL's. Returns
    None if it is unavailable; rank 0 logs the reason. All ranks must call this, and all get the
    same outcome.

    Args:
        group: NCCL process group whose ranks are on one node.
        device: this rank's device.
        store: store of the group.
        timeout: the store's timeout.
    """
    size = group.size()
    if size not in _WORLD_SIZES:
        logger.info("using NCCL all-reduce: no symmetric-memory kernel for %d ranks", size)
        return None
    # Ranks vote after each step, so that none waits in the next one for a rank that has failed.
    buffer, problem = _attempt(lambda: _allocate(device, size))
    if not _agree(group, device, buffer is not None):
        _log_fallback(group, problem)
        return None
    assert buffer is not None, "all ranks have one"
    store.set_timeout(_RENDEZVOUS_TIMEOUT)
    memory, problem = _attempt(lambda: SymmetricMemory(group, buffer))
    store.set_timeout(timeout)
    if not _agree(group, device, memory is not None):
        _log_fallback(group, problem)
        return None
    assert memory is not None, "all ranks have it"
    is_right, problem = _attempt(lambda: _is_right(memory, group, device))
    if not _agree(group, device, bool(is_right)):
        _log_fallback(group, problem or "its results differ from NCCL's")
        return None
    if group.rank() == 0:
        logger.info(
            "using symmetric-memory all-reduce (one-shot%s) up to %d KiB",
            memory.large_kernel and f", {memory.large_kernel} above {SMALL_BYTES >> 10} KiB",
            memory.max_bytes >> 10,
        )
    return memory


def _allocate(device: torch.device, world_size: int) -> torch.Tensor:
    """Allocates this rank's buffer."""
    import torch.distributed._symmetric_memory as symm_mem

    capability, _ = torch.cuda.get_device_capability(device)
    size = max_bytes(capability, world_size)
    return symm_mem.empty(size, dtype=torch.uint8, device=device)


def _attempt(work: Callable[[], R]) -> tuple[R | None, str]:
    """The result of `work` and an empty string, or None and the error message if it fails."""
    try:
        return work(), ""
    except (RuntimeError, ImportError, AttributeError) as error:
        return None, f"{type(error).__name__}: {error}"


def _is_right(memory: SymmetricMemory, group: ProcessGroup, device: torch.device) -> bool:
    """Whether all-reduces match NCCL's within rounding. Every rank runs every test, even after a
    mismatch."""
    is_right = True
    for dtype in _DTYPES:
        for count in _TEST_COUNTS:
            values = torch.arange(count * 4 // dtype.itemsize, device=device) % 251
            values_of_rank = (values.float() / 251 - group.rank() / 3).to(dtype)
            if not memory.takes(values_of_rank):
                continue
            expected = values_of_rank.clone()
            dist.all_reduce(expected, group=group)
            found = memory.all_reduce(values_of_rank.clone())
            tolerance = 8 * torch.finfo(dtype).eps * group.size()
            is_right &= torch.allclose(found.float(), expected.float(), tolerance, tolerance)
    return is_right


def _agree(group: ProcessGroup, device: torch.device, vote: bool) -> bool:
    """Whether all ranks vote true."""
    votes = torch.full((1,), float(vote), device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=group)
    return bool(votes.item())


def _log_fallback(group: ProcessGroup, problem: str) -> None:
    """Logs on rank 0 why NCCL is used."""
    if group.rank() == 0:
        reason = problem or "failed on another rank"
        logger.warning("using NCCL all-reduce: symmetric memory is unavailable (%s)", reason)
