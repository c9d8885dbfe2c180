"""LoRA in linear layers: weights of adapters on the device, and the adapters of a step's tokens.

A layer without adapters has none of this. With `--enable-lora`, every layer that supports adapters
has buffers for `max_loras` of them, and adds the products with those of the step's tokens to its
output. All layers share one `LoraRows`, which is set before each forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.lora import LoraTiles, LoraWeights, add_lora_


class LoraRows:
    """Adapters of the tokens of the current step; none until `set`."""

    def __init__(self) -> None:
        self._tiles: LoraTiles | None = None
        self._num_tokens = 0
        self._selected: LoraTiles | None = None

    def set(
        self, tiles: LoraTiles | None, num_tokens: int = 0, selected: LoraTiles | None = None
    ) -> None:
        """Sets the adapters of the next forward pass.

        Args:
            tiles: the T tokens by adapter; None if no token has one.
            num_tokens: T.
            selected: those of the S tokens that the last layer computes (`logits_indices`), by
                their indices among these; None if it computes all.
        """
        self._tiles, self._num_tokens, self._selected = tiles, num_tokens, selected

    def tiles(self, num_rows: int) -> LoraTiles | None:
        """Adapters of the rows of a layer's input: all tokens, or those of `selected`."""
        if self._tiles is None or num_rows == self._num_tokens:
            # Also if all tokens are selected, since their order is kept.
            return self._tiles
        assert self._selected is not None, f"{num_rows} rows of {self._num_tokens} tokens"
        return self._selected


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraFactors:
    """One adapter's weights of one layer on one rank, in host memory."""

    a: torch.Tensor
    """[groups, r, in]: first factors by projection; zeros for projections without an adapter."""
    b: torch.Tensor
    """[r, out]: transposed second factors, times the adapter's scale."""

    @property
    def num_bytes(self) -> int:
        """Size of both."""
        return (self.a.numel() + self.b.numel()) * self.a.element_size()


class LoraLayer:
    """Adapters of one linear layer.

    Args:
        weights: buffers for the adapters' weights.
        rows: adapters of the step's tokens.
    """

    def __init__(self, weights: LoraWeights, rows: LoraRows) -> None:
        self.weights = weights
        self._rows = rows

    def add_(self, out: torch.Tensor, x: object) -> torch.Tensor:
        """Adds the products with the tokens' adapters to the layer's output [R, out], in place;
        x [R, in] is its input."""
        assert isinstance(x, torch.Tensor), "as fp8_inputs says"
        tiles = self._rows.tiles(len(x))
        return out if tiles is None else add_lora_(out, x.contiguous(), self.weights, tiles)

    def load(self, slot: int, factors: LoraFactors | None) -> None:
        """Copies an adapter to slot `slot`, from 1; None if it does not change this layer. Does not
        wait for the device."""
        if factors is None:
            self.weights.clear(slot)
        else:
            self.weights.load(slot, factors.a, factors.b)
