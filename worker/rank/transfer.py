"""Transfers of small arrays from the host to the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]
Arrays = Mapping[str, npt.NDArray[Any]]


class Tensors(Protocol):
    """A group of arrays on the device."""

    def __getitem__(self, name: str, /) -> torch.Tensor:
        """The array called `name`, [length]."""
        ...


ALIGNMENT = 16
"""Alignment of arrays in bytes: Triton recompiles kernels for addresses that are not multiples of
16."""
_TORCH_TYPES = {
    "|u1": torch.uint8,
    "<i4": torch.int32,
    "<i8": torch.int64,
    "<f4": torch.float32,
}


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a tensor to a CUDA device via pinned memory, without waiting; returns it unchanged on
    CPU."""
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def gather(tensor: torch.Tensor, cells: Sequence[int]) -> list[int]:
    """Reads the elements `cells` of an integer tensor [n]; waits for the device."""
    if tensor.is_cpu:  # numpy is 10x faster than torch's ops
        return list(map(tensor.numpy().item, cells))
    values: list[int] = tensor[to_device(torch.tensor(cells), tensor.device)].tolist()
    return values


def scatter(tensor: torch.Tensor, cells: Sequence[int], values: Sequence[int]) -> None:
    """Writes `values` to the elements `cells` of an integer tensor [n]; does not wait for the
    device."""
    if tensor.is_cpu:
        array = tensor.numpy()
        for cell, value in zip(cells, values, strict=True):
            array[cell] = value
        return
    index = to_device(torch.tensor(cells), tensor.device)
    tensor.index_copy_(0, index, to_device(torch.tensor(values, dtype=tensor.dtype), tensor.device))


def aligned(num_bytes: int) -> int:
    """Number of bytes, rounded up to a multiple of the alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Uploader(Protocol):
    """Copies bytes to the device."""

    def upload(self, num_bytes: int, fill: Callable[[npt.NDArray[np.uint8]], None]) -> torch.Tensor:
        """Copies `num_bytes` bytes, written by `fill`, to the device; returns uint8 [num_bytes] for
        kernels that are launched later."""
        ...


def uploader_to(device: torch.device) -> Uploader:
    """An uploader that copies on the current stream."""
    return _CurrentStream(device)


class _CurrentStream:
    """Uploads with a copy on the current stream; without a copy on CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def upload(self, num_bytes: int, fill: Callable[[npt.NDArray[np.uint8]], None]) -> torch.Tensor:
        # torch's cache reuses pinned memory only after the copy from it.
        is_cuda = self._device.type == "cuda"
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        fill(host.numpy())
        return host.to(self._device, non_blocking=True)


def send(groups: Sequence[Arrays], uploader: Uploader) -> list[StagedArrays]:
    """Copies groups of contiguous one-dimensional arrays to the device, as slices of one buffer;
    does not wait for the device."""
    sizes = [sum(aligned(array.nbytes) for array in group.values()) for group in groups]

    def fill(target: npt.NDArray[np.uint8]) -> None:
        start = 0
        for group in groups:
            for array in group.values():
                target[start : start + array.nbytes] = array.view(np.uint8)
                start += aligned(array.nbytes)

    slices = torch.split(uploader.upload(sum(sizes), fill), sizes)
    return [
        StagedArrays(packed, {name: (array.dtype.str, len(array)) for name, array in group.items()})
        for packed, group in zip(slices, groups, strict=True)
    ]


def stage(arrays: Arrays, device: torch.device) -> StagedArrays:
    """Copies one group of arrays to the device on the current stream; does not wait for the
    device."""
    [staged] = send([arrays], uploader_to(device))
    return staged


class StagedArrays:
    """A group of arrays on the device, packed in one buffer.

    Args:
        packed: uint8 buffer, at least as long as the arrays.
        kinds: numpy's type string and the length of each array, in the order of the buffer.
    """

    def __init__(self, packed: torch.Tensor, kinds: Mapping[str, tuple[str, int]]) -> None:
        self.packed = packed
        self.kinds = kinds
        self._starts: dict[str, int] = {}
        start = 0
        for name, (dtype, length) in kinds.items():
            self._starts[name] = start
            start += aligned(length * int(dtype[2:]))

    def __getitem__(self, name: str) -> torch.Tensor:
        """The array called `name`, [length]."""
        (dtype, length), start = self.kinds[name], self._starts[name]
        num_bytes = length * int(dtype[2:])
        return self.packed[start : start + num_bytes].view(_TORCH_TYPES[dtype])

    def at(self, buffer: torch.Tensor) -> StagedArrays:
        """The same arrays as views of another buffer, to which the caller copies the bytes of this
        one."""
        return StagedArrays(buffer, self.kinds)
