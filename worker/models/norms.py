"""Norms that subtract the mean; those that do not are in `layers.py`, beside the attention that has
them for its heads."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from worker.models.linear_method import LayerOptions, WeightSlot


class LayerNorm:
    """Normalisation of the differences from the mean, over the last dimension.

    Args:
        size: of that dimension.
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
        self.weight = torch.empty(size, dtype=torch.float32, device=options.device)
        self.bias = torch.empty_like(self.weight) if has_bias else None
        self._eps, self._offset = eps, offset

    def weight_slots(self, name: str) -> Iterator[WeightSlot]:
        """The slots of `name`.weight and of its bias, whole on every rank."""
        shape = tuple(self.weight.shape)
        yield WeightSlot(
            name=f"{name}.weight", destination=self.weight, full_shape=shape, offset=self._offset
        )
        if self.bias is not None:
            yield WeightSlot(name=f"{name}.bias", destination=self.bias, full_shape=shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] to [..., size]; computed in fp32."""
        return torch.nn.functional.layer_norm(
            x.float(), x.shape[-1:], self.weight, self.bias, self._eps
        ).to(x.dtype)

    def forward_add(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual)."""
        total = x + residual
        return self.forward(total), total
