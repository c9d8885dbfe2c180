"""Short causal convolution of each channel, with its weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from kernels import short_convolution
from kernels.states import StateRows
from worker.models.layers.kv_cache import StatePlane
from worker.models.layers.linear_method import LayerOptions, WeightSlot


class ChannelPart(NamedTuple):
    """Consecutive channels on this rank."""

    start: int
    """Index of the first channel in the checkpoint."""
    size: int
    """Number of channels on this rank."""


class ShortConvolution:
    """A short causal convolution of this rank's channels.

    Args:
        parts: the channels of this rank, concatenated.
        full_size: number of channels in the checkpoint.
        num_taps: kernel size, the number of inputs on which an output depends.
        has_bias: whether channels have biases.
        has_silu: whether SiLU is applied to the output.
        options: options of the model's layers.
    """

    def __init__(
        self,
        parts: Sequence[ChannelPart],
        full_size: int,
        num_taps: int,
        *,
        has_bias: bool,
        has_silu: bool,
        options: LayerOptions,
    ) -> None:
        size = sum(part.size for part in parts)
        self._parts, self._full_size, self._has_silu = parts, full_size, has_silu
        self._weight = torch.empty(size, num_taps, dtype=options.dtype, device=options.device)
        self._bias: torch.Tensor | None = None
        if has_bias:
            self._bias = torch.empty(size, dtype=options.dtype, device=options.device)
        self.plane = StatePlane((num_taps - 1, size), options.dtype)
        """Specification of the last inputs, which are per-request state."""

    def weight_slots(self, name: str) -> Iterator[WeightSlot]:
        """Weight slots for `name`.weight and `name`.bias."""
        num_taps, first = self._weight.shape[1], 0
        for part in self._parts:
            own = slice(first, first + part.size)
            first += part.size
            yield WeightSlot(
                name=f"{name}.weight",
                destination=self._weight[own].unsqueeze(1),
                full_shape=(self._full_size, 1, num_taps),
                start=part.start,
            )
            if self._bias is not None:
                yield WeightSlot(
                    name=f"{name}.bias",
                    destination=self._bias[own],
                    full_shape=(self._full_size,),
                    start=part.start,
                )

    def process_after_loading(self) -> None:
        """Transposes the loaded weights to [num_taps, channels]."""
        self._weight = torch.stack(self._weight.unbind(1))

    def forward(self, x: torch.Tensor, states: torch.Tensor, rows: StateRows) -> torch.Tensor:
        """Convolves the tokens of all rows: maps x [T, C], whose rows may be strided, to [T, C].
        Updates the last inputs in `states` [states, num_taps - 1, C]."""
        return short_convolution(x, self._weight, self._bias, states, rows, has_silu=self._has_silu)
