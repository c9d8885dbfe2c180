"""MiniMax-M3 (huggingface.co/MiniMaxAI): block-sparse attention, clamped routed experts and a
shared expert.

Schema: `config/vendors/minimax.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch

from kernels import (
    Activation,
    Fp8Inputs,
    attend_to_blocks,
    qk_norm_rope_store,
    select_blocks,
    store_index_keys,
)
from worker.models.architectures.decoder import DecoderModel, FeedForward
from worker.models.architectures.llama import PreNormLayer
from worker.models.layers.attention import Attention, AttentionTraits, GatedMLP, attend_to_rows
from worker.models.layers.context import AttentionInputs, ForwardContext, KVCache
from worker.models.layers.kv_cache import IndexKeys
from worker.models.layers.linear import ColumnParallelLinear, ColumnPart, Rows, whole_part
from worker.models.layers.linear_method import WeightSlot
from worker.models.layers.moe import MoeMLP, MoeNames
from worker.models.layers.norms import RMSNorm

_NAMES = MoeNames(gate="w1", up="w3", down="w2", bias="e_score_correction_bias")


class BlockIndexer:
    """Scores blocks of tokens with one query per KV head and one cached key per token. Each rank
    has the queries of its own KV heads.

    Args:
        model: the model that the layer belongs to.
        attention: the layer's attention.
        index: 0-based index of the layer.
    """

    def __init__(self, model: MiniMaxM3ForCausalLM, attention: Attention, index: int) -> None:
        config, options, blocks = model.config, model.options, model.config.block_sparse
        assert blocks is not None, "the architecture has block-sparse attention"
        self._block_size, self._num_heads = blocks.block_size, attention.num_kv_heads
        self._cos_sin = model.rotary_table(index)
        self._batch_invariant = options.batch_invariant
        self.keys = IndexKeys(blocks.head_dim, options.dtype)
        """Index keys that the layer caches."""
        first = options.group.rank * config.num_kv_heads // options.group.world_size
        queries = ColumnPart(
            name="index_q_proj",
            full_size=config.num_kv_heads * blocks.head_dim,
            local_size=self._num_heads * blocks.head_dim,
            start=first * blocks.head_dim,
        )
        parts = [queries, whole_part("index_k_proj", blocks.head_dim)]
        self._input = ColumnParallelLinear(config.hidden_size, parts, bias=False, options=options)
        self._query_norm, self._key_norm = (
            RMSNorm(blocks.head_dim, config.rms_norm_eps, options, model.norm_offset)
            for _ in range(2)
        )

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of the projections and norms; `prefix` ends with a dot."""
        yield from self._input.weight_slots(prefix)
        yield from self._query_norm.weight_slots(f"{prefix}index_q_norm")
        yield from self._key_norm.weight_slots(f"{prefix}index_k_norm")

    def process_after_loading(self) -> None:
        """Packs the projections after loading."""
        self._input.process_after_loading()

    def store_keys(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        cache: KVCache,
        inputs: AttentionInputs,
    ) -> torch.Tensor:
        """Writes the index keys of a step's tokens [T, hidden] to the cache, and returns their
        index queries [T, heads, D], without rotary embedding."""
        assert cache.index_keys is not None, "the layer's specification has index keys"
        dim = self.keys.dim
        queries, keys = self._input.forward(hidden).split([self._num_heads * dim, dim], dim=1)
        store_index_keys(
            *(self._key_norm.forward(keys), cache.index_keys, inputs.slot_mapping),
            positions=positions,
            cos_sin_cache=self._cos_sin,
        )
        return self._query_norm.forward(queries.unflatten(1, (self._num_heads, dim)))

    def attend(
        self,
        q: torch.Tensor,
        queries: torch.Tensor,
        cache: KVCache,
        inputs: AttentionInputs,
        *,
        scale: float,
        value_scale: float,
    ) -> torch.Tensor:
        """Attention output of the N tokens of the step that select blocks. Their queries q [N,
        heads, head_dim] attend to the blocks selected by their index queries `queries` [N, heads,
        D]."""
        assert inputs.sparse is not None, "some tokens select blocks"
        assert cache.index_keys is not None, "the layer's specification has index keys"
        selection = select_blocks(
            *(queries, cache.index_keys, inputs.sparse.queries, self._block_size),
            cos_sin_cache=self._cos_sin,
            batch_invariant=self._batch_invariant,
        )
        return attend_to_blocks(
            *(q, (cache.k, cache.v), selection),
            scale=scale,
            value_scale=value_scale,
            batch_invariant=self._batch_invariant,
        )


class BlockSparseAttention(Attention):
    """Attention whose queries attend, per KV head, to the blocks of tokens that an indexer selects;
    in some layers, to all tokens.

    Args:
        model: the model that the layer belongs to.
        index: 0-based index of the layer.
    """

    def __init__(self, model: MiniMaxM3ForCausalLM, index: int) -> None:
        super().__init__(
            *(model.config, model.options),
            layer_index=index,
            cos_sin=model.rotary_table(index),
            traits=AttentionTraits(norm_offset=model.norm_offset),
        )
        blocks = model.config.block_sparse
        assert blocks is not None, "the architecture has block-sparse attention"
        assert self.kv_cache_spec is not None, "attention has a KV cache"
        self.indexer = BlockIndexer(model, self, index) if blocks.layers[index] else None
        """Selects blocks of tokens; None if queries attend to all tokens."""
        self.kv_cache_spec = replace(
            self.kv_cache_spec,
            top_k=blocks.top_k if any(blocks.layers) else 0,
            has_dense_layers=not all(blocks.layers),
            index_keys=None if self.indexer is None else self.indexer.keys,
        )

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of attention and of the indexer; `prefix` ends with a dot."""
        yield from super().weight_slots(prefix)
        if self.indexer is not None:
            yield from self.indexer.weight_slots(prefix)

    def process_after_loading(self) -> None:
        """Packs the projections after loading."""
        super().process_after_loading()
        if self.indexer is not None:
            self.indexer.process_after_loading()

    @property
    def fp8_inputs(self) -> Fp8Inputs | None:
        """FP8 input format that `forward` supports; None if the layer has an indexer, which reads
        unquantized rows."""
        return None if self.indexer is not None else super().fp8_inputs

    def forward(
        self,
        hidden: Rows,
        positions: torch.Tensor,
        ctx: ForwardContext,
        logits_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Maps inputs [T, hidden] to outputs [T, hidden], or [S, hidden] for the tokens in
        `logits_indices`. Writes the keys and values of all tokens to the cache."""
        q, k, v = (
            part.unflatten(1, (-1, self._head_dim))
            for part in self.qkv.forward(hidden).split(self._widths, dim=1)
        )
        cache, inputs = ctx.kv_caches[self._layer_index], ctx.attention[self._layer_index]
        scales = self.cache_scales
        q = qk_norm_rope_store(
            *(q, k, v, (cache.k, cache.v), inputs.slot_mapping),
            positions=positions,
            cos_sin_cache=self._cos_sin,
            norms=self._head_norms(),
            cache_scales=(scales.key, scales.value),
        )
        queries: torch.Tensor | None = None
        if self.indexer is not None:
            assert isinstance(hidden, torch.Tensor), "fp8_inputs excludes quantized inputs"
            queries = self.indexer.store_keys(hidden, positions, cache, inputs)
        if logits_indices is not None and not len(logits_indices):
            return q.new_empty(0, self._hidden_size)
        attended = self._attend(q, queries, cache, inputs, ctx.num_decode_tokens).flatten(1)
        return self.output.forward(
            attended if logits_indices is None else attended.index_select(0, logits_indices)
        )

    def _attend(
        self,
        q: torch.Tensor,
        queries: torch.Tensor | None,
        cache: KVCache,
        inputs: AttentionInputs,
        num_decodes: int,
    ) -> torch.Tensor:
        """Attention output of queries [T, heads, head_dim]. Index queries [T, heads, D] are only
        used if the layer has an indexer. The step's first `num_decodes` tokens are decodes."""
        indexer, sparse, scales = self.indexer, inputs.sparse, self.cache_scales
        scale, value_scale = self._scale * scales.key, scales.value
        dense = partial(attend_to_rows, scale=scale, value_scale=value_scale)
        if indexer is None or queries is None or sparse is None:
            return dense(q, cache, inputs.dense or inputs, num_decodes)
        blocks = partial(indexer.attend, scale=scale, value_scale=value_scale)
        if sparse.tokens is None or sparse.others is None:
            return blocks(q, queries, cache, inputs)
        selecting = q.index_select(0, sparse.tokens)
        found = blocks(selecting, queries.index_select(0, sparse.tokens), cache, inputs)
        others = q.index_select(0, sparse.others)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        out.index_copy_(0, sparse.tokens, found)
        rest = dense(others, cache, inputs, sparse.num_other_decodes)
        return out.index_copy_(0, sparse.others, rest)


class MiniMaxM3ForCausalLM(DecoderModel):
    """MiniMax-M3: per-head QK norm, and rotary embedding in part of each head; norms multiply by 1
    + weight."""

    norm_offset: ClassVar[float] = 1.0

    def build_layer(self, index: int) -> PreNormLayer:
        """Builds a layer with experts or with an MLP."""
        moe = self.config.moe
        assert moe is not None, "the architecture has experts"
        alpha, limit = self.extra("swiglu_alpha"), self.extra("swiglu_limit")
        activation = Activation("clamped", float(alpha), float(limit))
        is_dense = index in moe.dense_layers
        mlp: FeedForward
        if is_dense:
            size = int(self.extra("dense_intermediate_size"))
            mlp = GatedMLP(self.config, self.options, size, activate=activation)
        else:
            mlp = MoeMLP(
                *(self.config, self.options, _NAMES),
                activation=activation,
                shared_activation=activation,
            )
        return PreNormLayer(
            *(self, BlockSparseAttention(self, index), mlp),
            mixer_name="self_attn",
            mlp_name="mlp" if is_dense else "block_sparse_moe",
        )
