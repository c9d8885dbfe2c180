"""LoRA in linear layers: adapter weights on the device, and the adapters of a step's tokens.

Without `--enable-lora`, layers have no LoRA buffers. With it, every layer that supports adapters
has buffers for `max_loras` of them, and adds the LoRA outputs of the step's tokens to its output.
All layers share one `LoraRows`, which is set before each forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.lora import LoraTiles, LoraWeights, add_lora_, token_slots


class LoraRows:
    """Adapters of the current step's tokens; there are none before `set`."""

    def __init__(self) -> None:
        self._tiles: LoraTiles | None = None
        self._num_tokens = 0
        self._selected: LoraTiles | None = None

    def set(
        self, tiles: LoraTiles | None, num_tokens: int = 0, selected: LoraTiles | None = None
    ) -> None:
        """Sets the adapters of the next forward pass.

        Args:
            tiles: the T tokens grouped by adapter; None if no token has an adapter.
            num_tokens: T.
            selected: like `tiles`, for the S tokens that the last layer computes
                (`logits_indices`), with indices in [0, S); None if it computes all tokens.
        """
        self._tiles, self._num_tokens, self._selected = tiles, num_tokens, selected

    def tiles(self, num_rows: int) -> LoraTiles | None:
        """Adapters of the rows of a layer's input: of all tokens, or of the selected ones."""
        if self._tiles is None or num_rows == self._num_tokens:
            # Also valid if all tokens are selected, since their order is kept.
            return self._tiles
        assert self._selected is not None, f"{num_rows} rows of {self._num_tokens} tokens"
        return self._selected


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraFactors:
    """One adapter's weights of one layer on one rank, in host memory."""

    a: torch.Tensor
    """[groups, r, in]: A matrices by projection, zeros for projections without an adapter. For an
    embedding, [tokens, r]: transposed, for the rank's part of the vocabulary."""
    b: torch.Tensor
    """[r, out]: transposed B matrices, times the adapter's scale."""

    @property
    def num_bytes(self) -> int:
        """Size of `a` and `b`, in bytes."""
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

    @property
    def num_bytes(self) -> int:
        """Size of the buffers, in bytes."""
        return self.weights.num_bytes

    def add_(self, out: torch.Tensor, x: object) -> torch.Tensor:
        """Adds the LoRA outputs of the tokens' adapters to the layer's output [R, out], in place; x
        [R, in] is the layer's input."""
        assert isinstance(x, torch.Tensor), "fp8_inputs excludes quantized inputs"
        tiles = self._rows.tiles(len(x))
        return out if tiles is None else add_lora_(out, x.contiguous(), self.weights, tiles)

    def load(self, slot: int, factors: LoraFactors | None) -> None:
        """Copies an adapter to the 1-based slot `slot`; `factors` is None if it does not change
        this layer. Does not wait for the device."""
        if factors is None:
            self.weights.clear(slot)
        else:
            self.weights.load(slot, factors.a, factors.b)


class LoraEmbedding:
    """Adapters of an embedding: rows of A are looked up, then multiplied by B.

    Args:
        weights: buffers for B; the A matrices in the buffers are identities.
        num_tokens: size of the rank's part of the vocabulary.
        rows: adapters of the step's tokens.
    """

    def __init__(self, weights: LoraWeights, num_tokens: int, rows: LoraRows) -> None:
        self.weights = weights
        self._rows = rows
        b = weights.b
        self._a = torch.zeros(len(b), num_tokens, weights.rank, dtype=b.dtype, device=b.device)

    @property
    def num_bytes(self) -> int:
        """Size of the buffers, in bytes."""
        return self.weights.num_bytes + self._a.numel() * self._a.element_size()

    def add_(
        self, out: torch.Tensor, tokens: torch.Tensor, foreign: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Adds the LoRA outputs of the tokens' adapters to their embeddings [T, hidden], in place.

        Args:
            out: the embeddings.
            tokens: [T]: indices of the tokens in the rank's part of the vocabulary.
            foreign: bool [T]: tokens of other ranks' parts; None if there are none.
        """
        tiles = self._rows.tiles(len(tokens))
        if tiles is None:
            return out
        slots = token_slots(tiles, len(tokens))
        cells = (slots - 1).clamp_(min=0) * self._a.shape[1] + tokens
        x = self._a.flatten(0, 1).index_select(0, cells)
        if foreign is not None:
            x.masked_fill_(foreign.unsqueeze(1), 0)
        return add_lora_(out, x, self.weights, tiles)

    def load(self, slot: int, factors: LoraFactors | None) -> None:
        """Copies an adapter to the 1-based slot `slot`; `factors` is None if it does not change the
        embedding. Does not wait for the device."""
        if factors is None:
            self.weights.clear(slot)
            return
        rank = len(factors.b)
        identity = torch.eye(rank, self.weights.rank, dtype=factors.b.dtype)
        self.weights.load(slot, identity.unsqueeze(0), factors.b)
        self._a[slot - 1, :, :rank].copy_(factors.a, non_blocking=True)
        self._a[slot - 1, :, rank:].zero_()
