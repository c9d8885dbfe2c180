"""From the host to the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 16
"""Kernels are compiled for addresses that are multiples of it; others would compile anew."""


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies to CUDA without waiting, from pinned memory; on CPU the tensor itself."""
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


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
        self._num_bytes += -(-self._arrays[-1].nbytes // _ALIGNMENT) * _ALIGNMENT
        return len(self._arrays) - 1

    def send(self, device: torch.device) -> list[torch.Tensor]:
        """All arrays on the device, as views of one buffer."""
        # Pinned memory comes from torch's cache, which hands it out again only once the copy is
        # done.
        host = torch.empty(self._num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        bytes_host = host.numpy()
        for array, start in zip(self._arrays, self._starts, strict=True):
            bytes_host[start : start + array.nbytes] = array.view(np.uint8)
        staged = host.to(device, non_blocking=True)
        return [
            staged[start : start + array.nbytes].view(_TORCH_TYPES[array.dtype.str])
            for array, start in zip(self._arrays, self._starts, strict=True)
        ]


_TORCH_TYPES = {"<i4": torch.int32, "<i8": torch.int64, "<f4": torch.float32}
