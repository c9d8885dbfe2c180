"""Online FP8 quantization: weights of unquantized checkpoints are converted to e4m3, with a scale
per output feature, when they are packed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kernels import (
    ExpertWeights,
    PackedLinear,
    dequantize,
    pack_quantized_experts,
    pack_quantized_linear_weight,
    quantize_weight,
)
from worker.models.layers.linear_method import (
    LayerOptions,
    LinearWeight,
    UnquantizedMethod,
    WeightPart,
    WeightSlot,
)


class OnlineFp8Method(UnquantizedMethod):
    """Weights that are loaded in the model's data type and quantized to FP8 when packed."""

    def allocate(
        self, shape: tuple[int, int], parts: Sequence[WeightPart], options: LayerOptions
    ) -> LinearWeight:
        """Allocates one tensor for all parts, in the model's data type."""
        return _OnlineFp8Weight(super().allocate(shape, parts, options), options)


class _OnlineFp8Weight(LinearWeight):
    def __init__(self, loaded: LinearWeight, options: LayerOptions) -> None:
        self._loaded = loaded
        self._options = options

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        return self._loaded.slots(prefix)

    def dense(self) -> torch.Tensor:
        return dequantize(*quantize_weight(self._loaded.dense()), dtype=self._options.dtype)

    def destination(self) -> torch.Tensor:
        return self._loaded.destination()

    def reorder(self, rows: torch.Tensor) -> None:
        self._loaded.reorder(rows)

    def pack(self) -> PackedLinear:
        return pack_quantized_linear_weight(
            *quantize_weight(self._loaded.dense()),
            dtype=self._options.dtype,
            batch_invariant=self._options.batch_invariant,
        )

    def pack_experts(self, num_experts: int) -> ExpertWeights:
        values = self._loaded.dense().unflatten(0, (num_experts, -1))
        return pack_quantized_experts(ExpertWeights(*quantize_weight(values)), self._options.dtype)
