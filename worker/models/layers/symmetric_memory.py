"""Symmetric memory: small all-reduces among the GPUs of one node, with kernels that read peer
memory.

NCCL's latency is a large part of a decode step, which has two all-reduces of a few KiB per layer.
If GPUs can read each other's memory, each rank writes its input to a shared buffer, and one kernel
sums them: in the switch if supported (multimem), else by reading all inputs (one-shot). Both end
with a barrier, so that the next all-reduce may reuse the buffer.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

MOST_BYTES = 256 << 10
"""Maximum bytes of an all-reduce; larger ones are bound by bandwidth, and NCCL is faster."""
_ALIGNMENT = 16
"""Bytes per load of a kernel's thread."""
_WORLD_SIZES = (2, 4, 8)
"""World sizes for which the one-shot kernel adds in the order of ranks, so that results are bitwise
equal on all ranks."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MULTIMEM_DTYPES = (torch.bfloat16, torch.float32)
_TEST_VALUES = (8, 1000 * 8, MOST_BYTES // 4)
"""Sizes, in units of 4 bytes, of the all-reduces that are compared with NCCL's."""


class SymmetricMemory:
    """A buffer that all ranks of a group can read, and all-reduces in it.

    Args:
        group: NCCL process group.
        device: this rank's device.

    Raises:
        RuntimeError: the driver or the GPUs do not support it.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        self._group_name = group.group_name
        self._buffer = symm_mem.empty(MOST_BYTES, dtype=torch.uint8, device=device)
        self._handle = symm_mem.rendezvous(self._buffer, self._group_name)
        """Handle that keeps the peers' memory mapped."""
        self.has_multicast = bool(self._handle.multicast_ptr)

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether `all_reduce` supports a tensor of this size, type and layout."""
        return (
            0 < tensor.nbytes <= MOST_BYTES
            and tensor.nbytes % _ALIGNMENT == 0
            and tensor.dtype in _DTYPES
            and tensor.is_contiguous()
        )

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums over all ranks in place; the result is bitwise equal on all ranks."""
        part = self._buffer[: tensor.nbytes].view(tensor.dtype)
        part.copy_(tensor.view(-1))
        if self.has_multicast and tensor.dtype in _MULTIMEM_DTYPES:
            torch.ops.symm_mem.multimem_all_reduce_(part, "sum", self._group_name)
            tensor.view(-1).copy_(part)
        else:
            torch.ops.symm_mem.one_shot_all_reduce_out(
                part, "sum", self._group_name, tensor.view(-1)
            )
        return tensor


def create_symmetric_memory(group: ProcessGroup, device: torch.device) -> SymmetricMemory | None:
    """Symmetric memory for a group, after comparing its all-reduces with NCCL's; None if
    unavailable, and rank 0 logs the reason. All ranks must call this, and all get the same outcome.

    Args:
        group: NCCL process group whose ranks are on one node.
        device: this rank's device.
    """
    if group.size() not in _WORLD_SIZES:
        logger.info("using NCCL all-reduce: no symmetric-memory kernel for %d ranks", group.size())
        return None
    memory: SymmetricMemory | None = None
    reason = ""
    try:
        memory = SymmetricMemory(group, device)
    except (RuntimeError, ImportError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
    # If any rank failed, no rank may launch a kernel that waits for its peers.
    if not _agree(group, device, memory is not None):
        _log_fallback(group, reason or "failed on another rank")
        return None
    assert memory is not None, "all ranks have it"
    if not _agree(group, device, _is_right(memory, group, device)):
        _log_fallback(group, "its results differ from NCCL's")
        return None
    if group.rank() == 0:
        how = "multimem" if memory.has_multicast else "one-shot"
        logger.info("using symmetric-memory all-reduce (%s) up to %d KiB", how, MOST_BYTES >> 10)
    return memory


def _is_right(memory: SymmetricMemory, group: ProcessGroup, device: torch.device) -> bool:
    """Whether all-reduces agree with NCCL's within rounding. Every rank runs all of them, even
    after a mismatch."""
    is_right = True
    for dtype in _DTYPES:
        for count in _TEST_VALUES:
            values = torch.arange(count * 4 // dtype.itemsize, device=device) % 251
            values_of_rank = (values.float() / 251 - group.rank() / 3).to(dtype)
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


def _log_fallback(group: ProcessGroup, reason: str) -> None:
    if group.rank() == 0:
        logger.warning("using NCCL all-reduce: symmetric memory is unavailable (%s)", reason)
