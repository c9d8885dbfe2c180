"""From the host to the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT = 16
"""Kernels are compiled for addresses that are multiples of it; others would compile anew."""


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies to CUDA without waiting, from pinned memory; on CPU the tensor itself."""
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


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
    """Host arrays that travel to the device in one copy, which nobody waits for."""

    def __init__(self) -> None:
        self._arrays: list[npt.NDArray[Any]] = []
        self._starts: list[int] = []
        self._num_bytes = 0

    def add(self, array: npt.NDArray[Any]) -> int:
        """Adds an array of one dimension; returns its place in what `send` returns."""
        self._arrays.append(np.ascontiguousarray(array))
        self._starts.append(self._num_bytes)
        self._num_bytes += aligned(self._arrays[-1].nbytes)
        return len(self._arrays) - 1

    def send(self, uploader: Uploader) -> list[torch.Tensor]:
        """All arrays on the device, as views of one buffer."""
        staged = uploader.upload(self._num_bytes, self._fill)
        return [
            staged[start : start + array.nbytes].view(_TORCH_TYPES[array.dtype.str])
            for array, start in zip(self._arrays, self._starts, strict=True)
        ]

    def _fill(self, target: npt.NDArray[np.uint8]) -> None:
        for array, start in zip(self._arrays, self._starts, strict=True):
            target[start : start + array.nbytes] = array.view(np.uint8)


_TORCH_TYPES = {
    "|u1": torch.uint8,
    "<i4": torch.int32,
    "<i8": torch.int64,
    "<f4": torch.float32,
}
