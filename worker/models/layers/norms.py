"""Norms of hidden states and of attention heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch

from kernels import Fp8Inputs, Fp8Rows, Norm, fused_add_norm, fused_add_norm_fp8, rms_norm
from worker.models.layers.linear_method import LayerOptions, WeightSlot


class HiddenNorm(ABC):
    """A norm over the last dimension, of one tensor or of the sum of a block's output and the
    residual.

    Args:
        weight: [size], uninitialized.
        eps: added to the mean square, or to the variance.
        offset: added to the checkpoint's weight.
        block_scale: factor applied to a block's output in the residual sum.
    """

    def __init__(
        self, weight: torch.Tensor, eps: float, offset: float = 0.0, block_scale: float = 1.0
    ) -> None:
        self.weight = weight
        self.eps = eps
        """Epsilon that is added to the mean square, or to the variance."""
        self.block_scale = block_scale
        """Factor applied to a block's output in the residual sum."""
        self._offset = offset

    def weight_slots(self, name: str) -> Iterator[WeightSlot]:
        """The weight slot for `name`.weight, replicated on every rank."""
        yield WeightSlot(
            name=f"{name}.weight",
            destination=self.weight,
            full_shape=tuple(self.weight.shape),
            offset=self._offset,
        )

    @abstractmethod
    def norm(self, *, is_fp32: bool = False) -> Norm:
        """The norm for `fused_add_norm`; results are fp32 (`is_fp32`) or in the input's dtype."""

    @abstractmethod
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalizes x [..., size]; the result has the same shape."""

    def forward_add(
        self, x: torch.Tensor, residual: torch.Tensor, after_block: HiddenNorm | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds a block's output x to the residual; returns the norm of the sum, and the sum, [T,
        size] each. If `after_block` is given, that norm is applied to x before the addition."""
        (normed,), total = self._add(x, residual, (self.norm(),), after_block)
        return normed, total

    def forward_add_with_fp32(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Adds a block's output x to the residual; returns the norm of the sum, the sum, and the
        norm in fp32, which routers read, [T, size] each."""
        if x.dtype == torch.float32:
            normed, total = self.forward_add(x, residual)
            return normed, total, normed
        (normed, normed_fp32), total = self._add(
            x, residual, (self.norm(), self.norm(is_fp32=True))
        )
        return normed, total, normed_fp32

    def forward_fp8(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        inputs: Fp8Inputs,
        after_block: HiddenNorm | None = None,
    ) -> tuple[Fp8Rows, torch.Tensor]:
        """Returns the norm of the sum, and the sum, as `forward_add` does, with the norm quantized
        to FP8 in the format `inputs`. If there is no residual, the sum is x itself."""
        return fused_add_norm_fp8(
            *(x, residual, self.norm(), self.eps),
            by_block=inputs.by_block,
            x_weight=_weight_of(after_block),
            x_scale=1.0 if residual is None else self.block_scale,
        )

    def _add(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norms: tuple[Norm, ...],
        after_block: HiddenNorm | None = None,
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        weight, scale = _weight_of(after_block), self.block_scale
        return fused_add_norm(x, residual, norms, self.eps, x_weight=weight, x_scale=scale)


def _weight_of(after_block: HiddenNorm | None) -> torch.Tensor | None:
    """Weight of the norm of a block's output; None if there is no such norm."""
    assert not isinstance(after_block, LayerNorm), "fused sums only support RMSNorm"
    return None if after_block is None else after_block.weight


class RMSNorm(HiddenNorm):
    """Normalization by the root mean square.

    Args:
        size: size of the last dimension.
        eps: added to the mean square.
        options: options of the model's layers.
        offset: added to the checkpoint's weight; the result is kept in fp32.
        block_scale: factor applied to a block's output in the residual sum.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        options: LayerOptions,
        offset: float = 0.0,
        *,
        block_scale: float = 1.0,
    ) -> None:
        dtype = torch.float32 if offset else options.dtype
        weight = torch.empty(size, dtype=dtype, device=options.device)
        super().__init__(weight, eps, offset, block_scale)

    def multiply(self, factor: torch.Tensor) -> None:
        """Multiplies the loaded weight by a loaded factor [1]."""
        self.weight = self.weight.float() * factor.float()

    def norm(self, *, is_fp32: bool = False) -> Norm:
        """The norm for `fused_add_norm`; results are fp32 (`is_fp32`) or in the input's dtype."""
        return Norm(self.weight, is_fp32=is_fp32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalizes x [..., size]; the result has the same shape."""
        return rms_norm(x, self.weight, self.eps)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Returns residual + norm(x), [T, size] each."""
        return fused_add_norm(x, residual, (), self.eps, x_weight=self.weight)[1]


class LayerNorm(HiddenNorm):
    """Normalization by mean and variance.

    Args:
        size: size of the last dimension.
        eps: added to the variance.
        options: options of the model's layers.
        has_bias: whether the norm has a bias.
        offset: added to the checkpoint's weight.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        options: LayerOptions,
        *,
        has_bias: bool = False,
        offset: float = 0.0,
    ) -> None:
        weight = torch.empty(size, dtype=torch.float32, device=options.device)
        super().__init__(weight, eps, offset)
        self.bias = torch.empty_like(weight) if has_bias else None

    def weight_slots(self, name: str) -> Iterator[WeightSlot]:
        """Weight slots for `name`.weight and `name`.bias, replicated on every rank."""
        yield from super().weight_slots(name)
        if self.bias is not None:
            shape = tuple(self.bias.shape)
            yield WeightSlot(name=f"{name}.bias", destination=self.bias, full_shape=shape)

    def norm(self, *, is_fp32: bool = False) -> Norm:
        """The norm for `fused_add_norm`; results are fp32 (`is_fp32`) or in the input's dtype."""
        return Norm(self.weight, self.bias, subtracts_mean=True, is_fp32=is_fp32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalizes x [T, size], computed in fp32; the result has the same shape."""
        return fused_add_norm(x, None, (self.norm(),), self.eps)[0][0]
