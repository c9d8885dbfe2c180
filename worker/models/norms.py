"""Norms of hidden states and of heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch

from kernels import Norm, fused_add_norm, rms_norm
from worker.models.linear_method import LayerOptions, WeightSlot


class HiddenNorm(ABC):
    """A norm over the last dimension, alone or of a block's output and the residual together.

    Args:
        weight: of that dimension, unset.
        eps: added to the mean square.
        offset: what is added to the checkpoint's weight.
        block_scale: factor of a block's output before it goes to the residual.
    """

    def __init__(
        self, weight: torch.Tensor, eps: float, offset: float = 0.0, block_scale: float = 1.0
    ) -> None:
        self.weight = weight
        self.eps = eps
        """Added to the mean square."""
        self._offset, self._block_scale = offset, block_scale

    def weight_slots(self, name: str) -> Iterator[WeightSlot]:
        """The slot of `name`.weight, whole on every rank."""
        yield WeightSlot(
            name=f"{name}.weight",
            destination=self.weight,
            full_shape=tuple(self.weight.shape),
            offset=self._offset,
        )

    @abstractmethod
    def norm(self, *, is_wide: bool = False) -> Norm:
        """The norm of a sum, with a result in fp32 or in the type of its rows."""

    @abstractmethod
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] to [..., size]."""

    def forward_add(
        self, x: torch.Tensor, residual: torch.Tensor, after_block: HiddenNorm | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual), where a block's output x [T, size] passes a norm of
        its own before, if there is one."""
        (normed,), total = self._add(x, residual, (self.norm(),), after_block)
        return normed, total

    def forward_add_wide(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same, and behind it the norm in fp32, as routers read it."""
        if x.dtype == torch.float32:
            normed, total = self.forward_add(x, residual)
            return normed, total, normed
        (normed, wide), total = self._add(x, residual, (self.norm(), self.norm(is_wide=True)))
        return normed, total, wide

    def _add(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norms: tuple[Norm, ...],
        after_block: HiddenNorm | None = None,
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        assert not isinstance(after_block, LayerNorm), "sums are of root-mean-square norms"
        weight = None if after_block is None else after_block.weight
        scale = self._block_scale
        return fused_add_norm(x, residual, norms, self.eps, x_weight=weight, x_scale=scale)


class RMSNorm(HiddenNorm):
    """Normalisation by the root of the mean square.

    Args:
        size: of the last dimension.
        eps: added to the mean square.
        options: of the layer.
        offset: what is added to the checkpoint's weight; the sum is kept in fp32.
        block_scale: factor of a block's output before it goes to the residual.
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
        """Scales what it yields by a loaded factor [1] from now on, by way of its weight."""
        self.weight = self.weight.float() * factor.float()

    def norm(self, *, is_wide: bool = False) -> Norm:
        """The norm of a sum, with a result in fp32 or in the type of its rows."""
        return Norm(self.weight, is_wide=is_wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] to [..., size]."""
        return rms_norm(x, self.weight, self.eps)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + norm of x, both [T, size]."""
        return fused_add_norm(x, residual, (), self.eps, x_weight=self.weight)[1]


class LayerNorm(HiddenNorm):
    """Normalisation of the differences from the mean.

    Args:
        size: of the last dimension.
        eps: added to the variance.
        options: of the layer.
        has_bias: whether a bias is added to what comes of it.
        offset: what is added to the checkpoint's weight.
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
        """The slots of `name`.weight and of its bias, whole on every rank."""
        yield from super().weight_slots(name)
        if self.bias is not None:
            shape = tuple(self.bias.shape)
            yield WeightSlot(name=f"{name}.bias", destination=self.bias, full_shape=shape)

    def norm(self, *, is_wide: bool = False) -> Norm:
        """The norm of a sum, with a result in fp32 or in the type of its rows."""
        return Norm(self.weight, self.bias, subtracts_mean=True, is_wide=is_wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, size] to [T, size]; computed in fp32."""
        return fused_add_norm(x, None, (self.norm(),), self.eps)[0][0]
