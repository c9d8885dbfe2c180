"""Attention to the KV cache of an earlier layer: the layer has queries, but no keys and values of
its own."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels import HeadNorms, qk_norm_rope_store
from worker.models.config.model_config import ModelConfig
from worker.models.layers.attention import attend
from worker.models.layers.cache_scales import CacheScales
from worker.models.layers.context import ForwardContext
from worker.models.layers.kv_cache import KVCacheSpec, StateSpec
from worker.models.layers.linear import ColumnParallelLinear, RowParallelLinear, divided_part
from worker.models.layers.linear_method import LayerOptions, WeightSlot
from worker.models.layers.norms import RMSNorm
from worker.models.layers.sharing import local_heads


class SharedCacheAttention:
    """Grouped-query attention with QK norm that reads another layer's cached keys and values.

    It only computes the tokens in `ForwardContext.logits_indices`: nothing depends on its outputs
    for other tokens, which the model drops before this layer.

    Args:
        config: the layer's configuration (`ModelConfig.for_layer`).
        options: options of the model's layers.
        source: index of the layer whose cache is read, an earlier one with the same window.
        cache_scales: scales of that cache.
        cos_sin: rotary table [positions, rotary_dim].
        scale: factor applied to attention scores.
    """

    def __init__(
        self,
        config: ModelConfig,
        options: LayerOptions,
        *,
        source: int,
        cache_scales: CacheScales,
        cos_sin: torch.Tensor,
        scale: float,
    ) -> None:
        assert config.qk_norm, "queries are normalized like the cached keys"
        self.kv_cache_spec: KVCacheSpec | None = None
        """None, since the layer caches nothing."""
        self.state_spec: StateSpec | None = None
        """None, since attention keeps no state."""
        self._source, self._cache_scales = source, cache_scales
        self._cos_sin, self._scale = cos_sin, scale
        self._num_heads, _ = local_heads(config, options.group.world_size)
        self._head_dim = config.head_dim
        size = config.num_heads * config.head_dim
        self._query = ColumnParallelLinear(
            config.hidden_size,
            [divided_part("q_proj", size, options)],
            bias=config.qkv_bias,
            options=options,
            supports_lora=True,
        )
        self._output = RowParallelLinear(
            size,
            config.hidden_size,
            bias=config.output_bias,
            options=options,
            supports_lora=True,
        )
        self.q_norm: RMSNorm | None = RMSNorm(config.head_dim, config.rms_norm_eps, options)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of the two projections and the norm of queries; `prefix` ends with a dot."""
        yield from self._query.weight_slots(prefix)
        yield from self._output.weight_slots(f"{prefix}o_proj")
        if self.q_norm is not None:
            yield from self.q_norm.weight_slots(f"{prefix}q_norm")

    def process_after_loading(self) -> None:
        """Packs the projections after loading."""
        self._query.process_after_loading()
        self._output.process_after_loading()

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        ctx: ForwardContext,
        logits_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Maps inputs [S, hidden] and positions [S] to outputs [S, hidden], for the tokens in
        `ctx.logits_indices`, or for all tokens of the step if it is None."""
        assert logits_indices is None, "the model has dropped other tokens already"
        q = self._query.forward(hidden).view(len(hidden), self._num_heads, self._head_dim)
        no_heads, norms = q[:, :0], None
        if self.q_norm is not None:
            norms = HeadNorms(self.q_norm.weight, self.q_norm.weight, self.q_norm.eps)
        q = qk_norm_rope_store(
            *(q, no_heads, no_heads, (no_heads, no_heads), positions),
            positions=positions,
            cos_sin_cache=self._cos_sin,
            norms=norms,
        )
        attended = self._attend(q, ctx)
        return self._output.forward(attended.reshape(len(hidden), -1))

    def _attend(self, q: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Computes attention for queries [S, heads, head_dim]."""
        scales, tokens = self._cache_scales, ctx.logits_indices
        if tokens is not None:
            # Attention is planned for the rows of all tokens.
            num_tokens = len(ctx.attention[self._source].slot_mapping)
            q = q.new_zeros(num_tokens, *q.shape[1:]).index_copy_(0, tokens, q)
        attended = attend(
            *(q, ctx.kv_caches[self._source], ctx, self._source),
            scale=self._scale * scales.key,
            value_scale=scales.value,
        )
        return attended if tokens is None else attended.index_select(0, tokens)
