"""Weights in the layout of the compiled library."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from kernels.native.library import LinearWeight, library
from kernels.native.lora import NativeLora
from kernels.native.weight_memory import WeightMemory


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearTensors:
    """A weight [out, in], its bias [out], and its LoRA adapters; None if there are none."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    lora: NativeLora | None = None


class PackedTensors:
    """Packed weights and copies of a model, and their addresses.

    Args:
        memory: memory for the weights and copies, which may be filled with them already; None for
            memory of this process.
    """

    def __init__(self, memory: WeightMemory | None = None) -> None:
        self._memory = memory or WeightMemory()
        self._kept: list[torch.Tensor | NativeLora] = []

    def linear(self, linear: LinearTensors) -> LinearWeight:
        """A packed weight, its bias and its adapters."""
        n, k = linear.weight.shape
        packed = pack_weight(linear.weight, self._memory)
        weight = LinearWeight(self.keep(packed), self.floats(linear.bias), n, k)
        if linear.lora is not None:
            self._kept.append(linear.lora)
            weight.lora = ctypes.pointer(linear.lora.tensors)
        return weight

    def floats(self, values: torch.Tensor | None) -> int | None:
        """Address of an fp32 copy; None if `values` is None."""
        return None if values is None else self.copy(values, torch.float32)

    def copy(self, values: torch.Tensor, dtype: torch.dtype | None = None) -> int:
        """Address of a copy, in `dtype` if given."""
        copy = self._memory.take(values.numel(), dtype=dtype or values.dtype)
        if not self._memory.is_filled:
            copy.view(values.shape).copy_(values)
        return self.keep(copy)

    def keep(self, tensor: torch.Tensor) -> int:
        """Address of a tensor, which is kept alive as long as this object."""
        self._kept.append(tensor)
        return tensor.data_ptr()


def pack_weight(weight: torch.Tensor, memory: WeightMemory | None = None) -> torch.Tensor:
    """Packs a weight [N, K] in the library's blocked layout: a flat tensor of the same dtype."""
    compiled, (n, k) = library(), weight.shape
    memory, is_bf16 = memory or WeightMemory(), weight.dtype == torch.bfloat16
    packed = memory.take(compiled.rayfleet_packed_elements(is_bf16, n, k), dtype=weight.dtype)
    if not memory.is_filled:
        source = weight.contiguous()
        compiled.rayfleet_pack(is_bf16, source.data_ptr(), n, k, packed.data_ptr())
    return packed


def multiply(x: torch.Tensor, packed: torch.Tensor, n: int) -> torch.Tensor:
    """Multiplies x, fp32 [T, K], by a transposed packed weight [N, K] on one thread: fp32
    [T, N]."""
    rows, k = x.shape
    source, out = x.contiguous(), torch.empty(rows, n)
    weight = LinearWeight(packed.data_ptr(), None, n, k)
    is_bf16 = packed.dtype == torch.bfloat16
    library().rayfleet_linear(
        is_bf16, source.data_ptr(), rows, ctypes.byref(weight), out.data_ptr()
    )
    return out
