"""EncoderAttention: bidirectional attention within prompts that are computed in one step."""

from __future__ import annotations

import torch

from worker.models.config.model_config import ModelConfig
from worker.models.layers.attention import Attention, AttentionTraits
from worker.models.layers.context import ForwardContext
from worker.models.layers.linear import Rows
from worker.models.layers.linear_method import LayerOptions


class EncoderAttention(Attention):
    """Attention of each token to all tokens of its prompt, or to those near it.

    Args:
        config: the model's configuration.
        options: options of the model's layers.
        layer_index: 0-based index of the layer.
        cos_sin: rotary table [positions, head_dim].
        traits: names of the block's weights, and whether queries and keys have rotary embedding.
        distance: maximum distance of tokens that attend to each other; None for no limit.
    """

    def __init__(
        self,
        config: ModelConfig,
        options: LayerOptions,
        *,
        layer_index: int,
        cos_sin: torch.Tensor,
        traits: AttentionTraits,
        distance: int | None = None,
    ) -> None:
        super().__init__(config, options, layer_index=layer_index, cos_sin=cos_sin, traits=traits)
        self._distance = distance

    def forward(
        self,
        hidden: Rows,
        positions: torch.Tensor,
        ctx: ForwardContext,
        logits_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Maps inputs [T, hidden] to outputs [T, hidden], or [S, hidden] for the tokens in
        `logits_indices`. The cache is neither read nor written."""
        parts = self.qkv.forward(hidden).split(self._widths, dim=1)
        q, k, v = (part.view(len(part), -1, self._head_dim) for part in parts)
        if logits_indices is not None and not len(logits_indices):
            return torch.empty(0, self._hidden_size, dtype=q.dtype, device=q.device)
        if self._traits.rotates:
            q, k = (_rotated(part, self._cos_sin.index_select(0, positions)) for part in (q, k))
        # HAZARD(invariance): row by row, since matmuls may depend on the padding of other rows.
        rows = zip(*(part.split(list(ctx.row_lengths)) for part in (q, k, v)), strict=True)
        attended = torch.cat([self._attend(*row) for row in rows]).flatten(1)
        return self.output.forward(
            attended if logits_indices is None else attended.index_select(0, logits_indices)
        )

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Computes attention among the n tokens of one prompt; q, k and v are [n, heads, head_dim]
        each."""
        mask: torch.Tensor | None = None
        if self._distance is not None and len(q) > self._distance + 1:
            places = torch.arange(len(q), device=q.device)
            mask = (places - places.unsqueeze(1)).abs() <= self._distance
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
        attended: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=self._scale
        )
        return attended.squeeze(0).transpose(0, 1)


def _rotated(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Applies rotary embedding (NeoX style) to x [T, heads, head_dim], with cosines and sines fp32
    [T, head_dim]; computed in fp32."""
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
