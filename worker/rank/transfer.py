"""Copies from the host to the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]
Arrays = Mapping[str, npt.NDArray[Any]]

ALIGNMENT = 16
"""Kernels are compiled for addresses that are multiples of it; others would compile anew."""
_TORCH_TYPES = {
    "|u1": torch.uint8,
    "<i4": torch.int32,
    "<i8": torch.int64,
    "<f4": torch.float32,
}


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies to CUDA without waiting, from pinned memory; on CPU the tensor itself."""
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def gather(tensor: torch.Tensor, cells: Sequence[int]) -> list[int]:
    """Cells of an integer tensor of one dimension; waits for the device."""
    if tensor.is_cpu:  # numpy's items take a tenth of the time of torch's ops
        return list(map(tensor.numpy().item, cells))
    values: list[int] = tensor[to_device(torch.tensor(cells), tensor.device)].tolist()
    return values


def scatter(tensor: torch.Tensor, cells: Sequence[int], values: Sequence[int]) -> None:
    """Writes cells of an integer tensor of one dimension; nobody waits."""
    if tensor.is_cpu:
        array = tensor.numpy()
        for cell, value in zip(cells, values, strict=True):
            array[cell] = value
        return
    index = to_device(torch.tensor(cells), tensor.device)
    tensor.index_copy_(0, index, to_device(torch.tensor(values, dtype=tensor.dtype), tensor.device))


def aligned(num_bytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Uploader(Protocol):
    """Takes bytes to the device."""

    def upload(self, num_bytes: int, fill: Callable[[npt.NDArray[np.uint8]], None]) -> torch.Tensor:
        """Has `fill` write so many bytes; they will be on the device, uint8, for what follows."""
        ...


def uploader_to(device: torch.device) -> Uploader:
    """One that needs no more than the device."""
    return _CurrentStream(device)


class _CurrentStream:
    """Uploads by a copy on the current stream, which is none on CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def upload(self, num_bytes: int, fill: Callable[[npt.NDArray[np.uint8]], None]) -> torch.Tensor:
        # Pinned memory comes from torch's cache, which hands it out again only once the copy is
        # done.
        is_cuda = self._device.type == "cuda"
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        fill(host.numpy())
        return host.to(self._device, non_blocking=True)


class Staging:
    """Groups of host arrays that travel to the device in one copy, which nobody waits for."""

    def __init__(self) -> None:
        self._groups: list[Arrays] = []

    def add(self, arrays: Arrays) -> int:
        """Adds contiguous arrays of one dimension; returns the group's index in what `send`
        returns."""
        self._groups.append(arrays)
        return len(self._groups) - 1

    def send(self, uploader: Uploader) -> list[StagedArrays]:
        """All groups on the device, each a slice of one buffer."""
        sizes = [sum(aligned(array.nbytes) for array in group.values()) for group in self._groups]
        slices = torch.split(uploader.upload(sum(sizes), self._fill), sizes)
        return [
            StagedArrays(
                packed,
                {name: (array.dtype.str, len(array)) for name, array in group.items()},
            )
            for packed, group in zip(slices, self._groups, strict=True)
        ]

    def _fill(self, target: npt.NDArray[np.uint8]) -> None:
        start = 0
        for group in self._groups:
            for array in group.values():
                target[start : start + array.nbytes] = array.view(np.uint8)
                start += aligned(array.nbytes)


def stage(arrays: Arrays, device: torch.device) -> StagedArrays:
    """One group of arrays on the device, by a copy on the current stream, which nobody waits
    for."""
    staging = Staging()
    staging.add(arrays)
    [staged] = staging.send(uploader_to(device))
    return staged


class StagedArrays:
    """A group of arrays on the device, one after another in one buffer.

    Args:
        packed: the buffer, uint8; it may be longer.
        kinds: numpy's name of the type, and the length, of each array, in order.
    """

    def __init__(self, packed: torch.Tensor, kinds: Mapping[str, tuple[str, int]]) -> None:
        self.packed = packed
        self.kinds = kinds
        self._starts: dict[str, int] = {}
        start = 0
        for name, (dtype, length) in kinds.items():
            self._starts[name] = start
            start += aligned(length * int(dtype[2:]))

    def get(self, name: str) -> torch.Tensor | None:
        """One array [length]; None where it is not in the group."""
        return self[name] if name in self.kinds else None

    def __getitem__(self, name: str) -> torch.Tensor:
        """One array [length]."""
        (dtype, length), start = self.kinds[name], self._starts[name]
        num_bytes = length * int(dtype[2:])
        return self.packed[start : start + num_bytes].view(_TORCH_TYPES[dtype])

    def at(self, buffer: torch.Tensor) -> StagedArrays:
        """The same arrays where another buffer would hold a copy of this one's bytes."""
        return StagedArrays(buffer, self.kinds)
