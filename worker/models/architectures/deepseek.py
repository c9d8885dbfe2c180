"""DeepSeek V2 to V3.2, and families with the same attention: Kimi K2, GLM-4.7-Flash, GLM-5,
Moonlight, Mistral 4.

Schemas: `config/vendors/deepseek.py`, `config/vendors/zai.py` and `config/vendors/mistral.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Self

import torch

from kernels import (
    Expansion,
    Fp8Inputs,
    LatentRows,
    PackedLinear,
    attend_to_cells,
    linear,
    mla_prefill,
    pack_linear_weight,
    prepare_latents,
)
from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.llama import PreNormLayer
from worker.models.architectures.qwen3_moe import Qwen3MoeForCausalLM
from worker.models.config.mla_config import MlaConfig
from worker.models.config.model_config import ModelConfig
from worker.models.layers.attention import attend_to_rows
from worker.models.layers.cache_scales import CacheScales
from worker.models.layers.context import (
    AttentionInputs,
    ExpandedInputs,
    ForwardContext,
    KVCache,
)
from worker.models.layers.indexer import Indexer
from worker.models.layers.kv_cache import KVCacheSpec, StateSpec
from worker.models.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    Rows,
    divided_part,
    whole_part,
)
from worker.models.layers.linear_method import LayerOptions, WeightSlot
from worker.models.layers.moe import MoeNames
from worker.models.layers.norms import RMSNorm
from worker.models.layers.sharing import divide

_UNUSED_SCALES = ("v_proj.v_scale", "v_scale")
"""Names of value scales that a checkpoint may have. They are unused: a latent is both key and
value, and uses the keys' scale."""
_EPS = 1e-6
"""Epsilon of the norms within a model's attention. DeepSeek's code and transformers do not read it
from config.json. vLLM uses rms_norm_eps, which is 1e-5 in GLM 4.7 Flash, GLM 5 and Kimi K2.5.
"""


class DeepseekForCausalLM(Qwen3MoeForCausalLM):
    """DeepSeek: multi-head latent attention (MLA); the first layers are dense."""

    moe_names: ClassVar[MoeNames] = MoeNames(bias="gate.e_score_correction_bias")

    def build_layer(self, index: int) -> PreNormLayer:
        """Builds a layer with experts or with an MLP, as specified in config.json."""
        attention = LatentAttention.of(self, index, self.query_scale)
        return PreNormLayer(self, attention, self.build_mlp(index), mixer_name="self_attn")


class LatentAttention:
    """Multi-head latent attention (MLA, arXiv 2405.04434), computed in the latent space or, for
    prompts, with the keys and values of all heads.

    Keys and values of all heads are projections of one latent vector c per token. In addition, keys
    have a part r with rotary embedding, which is the same for all heads. Let q be the part of a
    head's query without rotary embedding. Its score with the head's key U c is
    q · (U c) = (U^T q) · c. All heads thus share the "key" [c, r], whose leading part c is the
    "value", and each head then projects the result to its values. The cache of [c, r] is replicated
    on every rank; heads are divided among the ranks. Rows attend to U c and r instead if that is
    cheaper (`Expansion.saves_work`).

    With sparse attention, a query attends to the tokens that an indexer selects. The indexer is
    part of the layer itself or of the nearest earlier layer that has one.

    Args:
        config: the configuration of the layer's checkpoint.
        options: options of the layer.
        layer_index: 0-based index of the layer.
        cos_sin: rotary table [positions, rotary_dim]; None if the layer has no rotary embedding.
        eps: epsilon of the norms applied to latents.
        query_scale: factors applied to queries, by position, fp32 [positions]; None if queries are
            not scaled.
        input_size: size of the input; 0 for the hidden size.
    """

    _up: torch.Tensor
    """[heads * (plain_dim + value_dim), kv_rank]: projects latents to keys and values."""
    _to_latents: _HeadProducts
    """[heads, plain_dim, kv_rank]: projects queries without rotary embedding to the latent
    space."""
    _to_values: _HeadProducts
    """[heads, kv_rank, value_dim]: projects the attention output to the heads' values."""

    def __init__(
        self,
        config: ModelConfig,
        options: LayerOptions,
        *,
        layer_index: int,
        cos_sin: torch.Tensor | None,
        eps: float,
        query_scale: torch.Tensor | None = None,
        input_size: int = 0,
    ) -> None:
        mla = config.mla
        assert mla is not None, "the architecture has latents"
        self._mla, self._layer_index, self._hidden_size = mla, layer_index, config.hidden_size
        self._cos_sin, self._query_scale = cos_sin, query_scale
        self._num_heads = divide(
            config.num_heads, options.group.world_size, "the number of attention heads"
        )
        self._scale = mla.query_dim**-0.5 * mla.score_factor
        self.indexer = _indexer(config, options, layer_index, cos_sin)
        """Selects tokens; None if attention is not sparse, or if an earlier layer selects them."""
        self._batch_invariant = options.batch_invariant
        self._expansion = _expansion(mla, self._num_heads, options)
        self.kv_cache_spec: KVCacheSpec | None = KVCacheSpec(
            num_kv_heads=1,
            head_dim=mla.cached_dim,
            dtype=options.cache_dtype or options.dtype,
            value_dim=mla.kv_rank,
            top_k=0 if mla.indexer is None else mla.indexer.top_k,
            index_keys=None if self.indexer is None else self.indexer.keys,
            expansion=self._expansion,
        )
        """Specification of the layer's cache of latents."""
        self.state_spec: StateSpec | None = None
        """None, since attention keeps no state."""
        self.cache_scales = CacheScales(
            options, keys=("k_proj.k_scale", "k_scale", "kv_scale"), values=_UNUSED_SCALES
        )
        queries = config.num_heads * mla.query_dim
        first = divided_part("q_proj", queries, options)
        self.q_norm: RMSNorm | None = None
        self.q_up: ColumnParallelLinear | None = None
        if mla.q_rank is not None:
            first = whole_part("q_a_proj", mla.q_rank)
            self.q_norm = RMSNorm(mla.q_rank, eps, options)
            up = [divided_part("q_b_proj", queries, options)]
            self.q_up = ColumnParallelLinear(
                mla.q_rank, up, bias=False, options=options, supports_lora=True
            )
        self._split = [first.local_size, mla.kv_rank, mla.rotary_dim]
        latents = whole_part("kv_a_proj_with_mqa", mla.cached_dim)
        self.down = ColumnParallelLinear(
            input_size or config.hidden_size,
            [first, latents],
            bias=False,
            options=options,
            supports_lora=True,
        )
        self.kv_norm = RMSNorm(mla.kv_rank, eps, options)
        keys_and_values = config.num_heads * (mla.plain_dim + mla.value_dim)
        self.kv_up = ColumnParallelLinear(
            mla.kv_rank,
            [divided_part("kv_b_proj", keys_and_values, options)],
            bias=False,
            options=options,
        )
        values = config.num_heads * mla.value_dim
        self.output = RowParallelLinear(
            values, config.hidden_size, bias=False, options=options, supports_lora=True
        )

    @classmethod
    def of(cls, model: DecoderModel, index: int, query_scale: torch.Tensor | None = None) -> Self:
        """The attention of layer `index` of a model; `query_scale` as in the constructor."""
        return cls(
            *(model.config, model.options),
            layer_index=index,
            cos_sin=model.rotary_table(index) if model.rotates(index) else None,
            eps=_EPS,
            query_scale=query_scale,
        )

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of all projections and norms; `prefix` ends with a dot."""
        yield from self.down.weight_slots(prefix)
        if self.q_norm is not None and self.q_up is not None:
            yield from self.q_norm.weight_slots(f"{prefix}q_a_layernorm")
            yield from self.q_up.weight_slots(prefix)
        yield from self.kv_norm.weight_slots(f"{prefix}kv_a_layernorm")
        yield from self.kv_up.weight_slots(prefix)
        yield from self.output.weight_slots(f"{prefix}o_proj")
        yield from self.cache_scales.weight_slots(prefix)
        if self.indexer is not None:
            yield from self.indexer.weight_slots(f"{prefix}indexer.")

    def process_after_loading(self) -> None:
        """Packs the projections after loading; splits the projection of latents into one for keys
        and one for values."""
        if self._mla.is_interleaved:
            self._put_halves_first()
        self.down.process_after_loading()
        if self.q_up is not None:
            self.q_up.process_after_loading()
        self._up = self.kv_up.weight.dense()
        up = self._up.view(self._num_heads, -1, self._mla.kv_rank)
        keys, values = up.split([self._mla.plain_dim, self._mla.value_dim], dim=1)
        self._to_latents, self._to_values = (
            _HeadProducts(weights, batch_invariant=self._batch_invariant)
            for weights in (keys, values.transpose(1, 2))
        )
        self.kv_up.drop()
        self.output.process_after_loading()
        self.cache_scales.process_after_loading()
        if self.indexer is not None:
            self.indexer.process_after_loading()

    @property
    def fp8_inputs(self) -> Fp8Inputs | None:
        """FP8 input format that `forward` supports; None if it only accepts unquantized rows."""
        return None if self.indexer is not None else self.down.fp8_inputs

    def forward(
        self,
        hidden: Rows,
        positions: torch.Tensor,
        ctx: ForwardContext,
        logits_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Maps inputs [T, hidden] to outputs [T, hidden], or [S, hidden] for the tokens in
        `logits_indices`. Writes the latents of all tokens to the cache."""
        q, latents, rotating = self.down.forward(hidden).split(self._split, dim=-1)
        cache, inputs = ctx.kv_caches[self._layer_index], ctx.attention[self._layer_index]
        if self.q_norm is not None and self.q_up is not None:
            fp8_inputs = self.q_up.fp8_inputs
            if self.indexer is not None:
                assert isinstance(hidden, torch.Tensor), "fp8_inputs excludes quantized inputs"
                q_latents = self.q_norm.forward(q)
                q = self.q_up.forward(q_latents)
                self.indexer.run(hidden, q_latents, positions, cache, inputs)
            elif fp8_inputs is not None and len(q) >= fp8_inputs.min_rows:
                q = self.q_up.forward(self.q_norm.forward_fp8(q, None, fp8_inputs)[0])
            else:
                q = self.q_up.forward(self.q_norm.forward(q))
        q, expanded = q.unflatten(-1, (self._num_heads, -1)), inputs.expanded
        queries = None if expanded is not None else self._empty_queries(q)
        cache_scale = self.cache_scales.key
        prepare_latents(
            *(q, queries, LatentRows(latents, rotating, self.kv_norm.weight, self.kv_norm.eps)),
            *(cache.k, inputs.slot_mapping),
            positions=positions,
            cos_sin_cache=self._cos_sin,
            query_scale=self._query_scale,
            cache_scale=cache_scale,
        )
        if logits_indices is not None and not len(logits_indices):
            nothing: torch.Tensor = q.new_empty(0, self._hidden_size)
            return nothing
        if queries is None:
            assert expanded is not None, "only queries in expanded form stay as they are"
            values = self._attend_expanded(q, cache, inputs, expanded, ctx.num_decode_tokens)
            if logits_indices is not None:
                values = values.index_select(0, logits_indices)
        else:
            self._absorb(q, queries)
            found = self._attend(queries, cache, inputs, ctx.num_decode_tokens)
            if logits_indices is not None:
                found = found.index_select(0, logits_indices)
            values = self._values(found)
        return self.output.forward(values.flatten(1))

    def _empty_queries(self, q: torch.Tensor) -> torch.Tensor:
        return q.new_empty(*q.shape[:2], self._mla.cached_dim)

    def _absorb(self, q: torch.Tensor, queries: torch.Tensor) -> None:
        """Projects queries without rotary embedding to the latent space, and writes the results to
        `queries`."""
        plain, absorbed = q[..., : self._mla.plain_dim], queries[..., : self._mla.kv_rank]
        self._to_latents.multiply(plain, absorbed)

    def _values(self, found: torch.Tensor) -> torch.Tensor:
        """Projects attention results from the latent space to the heads' values."""
        values = found.new_empty(*found.shape[:2], self._mla.value_dim)
        self._to_values.multiply(found, values)
        return values

    def _attend_expanded(
        self,
        q: torch.Tensor,
        cache: KVCache,
        inputs: AttentionInputs,
        expanded: ExpandedInputs,
        num_decodes: int,
    ) -> torch.Tensor:
        """Computes attention in a step with rows in expanded form: maps queries [T, heads,
        query_dim] to outputs [T, heads, value_dim]. Other rows attend in the latent space."""
        assert self._expansion is not None, "rows are in expanded form by the layer's sizes"
        tokens, others = expanded.tokens, expanded.others
        scale = self.cache_scales.key
        found = mla_prefill(
            *(q if tokens is None else q.index_select(0, tokens), cache.k, self._up),
            *(expanded.rows, self._expansion),
            scale=self._scale * scale,
            value_scale=scale,
        )
        if tokens is None or others is None:
            return found
        absorbing = q.index_select(0, others)
        queries = self._empty_queries(absorbing)
        queries[..., self._mla.kv_rank :] = absorbing[..., self._mla.plain_dim :]
        self._absorb(absorbing, queries)
        values = self._values(self._attend(queries, cache, inputs, num_decodes))
        out = found.new_empty(len(q), *found.shape[1:])
        out.index_copy_(0, tokens, found)
        return out.index_copy_(0, others, values)

    def _attend(
        self, queries: torch.Tensor, cache: KVCache, inputs: AttentionInputs, num_decodes: int
    ) -> torch.Tensor:
        """Computes attention in the latent space: maps queries [T, heads, cached_dim] to outputs
        [T, heads, kv_rank]. The step's first `num_decodes` tokens are decodes."""
        cache_scale, sparse = self.cache_scales.key, inputs.sparse
        factors = {"scale": self._scale * cache_scale, "value_scale": cache_scale}
        if sparse is None:
            return attend_to_rows(queries, cache, inputs, num_decodes, **factors)
        assert sparse.cells is not None, "the first layer has an indexer"
        selecting = queries
        if sparse.tokens is not None:
            selecting = queries.index_select(0, sparse.tokens)
        found = attend_to_cells(
            *(selecting, cache.k, sparse.cells, self._mla.kv_rank),
            batch_invariant=self._batch_invariant,
            **factors,
        )
        if sparse.tokens is None or sparse.others is None:
            return found
        others = attend_to_rows(
            *(queries.index_select(0, sparse.others), cache, inputs, sparse.num_other_decodes),
            **factors,
        )
        out = found.new_empty(len(queries), *found.shape[1:])
        out.index_copy_(0, sparse.tokens, found)
        return out.index_copy_(0, sparse.others, others)

    def _put_halves_first(self) -> None:
        """Reorders the output features of queries and keys so that pairs of rotary dimensions are
        split into two halves instead of interleaved. Scores stay the same, since queries and keys
        are reordered identically."""
        mla = self._mla
        halves = torch.arange(mla.rotary_dim).view(-1, 2).T.flatten()
        down = torch.arange(sum(self._split))
        down[-mla.rotary_dim :] = down[-mla.rotary_dim :][halves]
        queries = torch.arange(self._num_heads * mla.query_dim).view(self._num_heads, -1)
        queries[:, mla.plain_dim :] = queries[:, mla.plain_dim :][:, halves]
        if self.q_up is None:
            down[: self._split[0]] = queries.flatten()
        else:
            self.q_up.reorder(queries.flatten())
        self.down.reorder(down)


def _indexer(
    config: ModelConfig, options: LayerOptions, index: int, cos_sin: torch.Tensor | None
) -> Indexer | None:
    """The indexer of layer `index`; None if the layer has none."""
    mla = config.mla
    if mla is None or mla.indexer is None or not mla.indexer.layers[index]:
        return None
    assert mla.q_rank is not None, "the family requires latent vectors of queries"
    assert cos_sin is not None, "the family has rotary embedding in all layers"
    return Indexer(mla.indexer, config.hidden_size, mla.q_rank, cos_sin, options)


def _expansion(mla: MlaConfig, num_heads: int, options: LayerOptions) -> Expansion | None:
    """Sizes of a rank's keys and values in expanded form, which is used for prompts. None if
    expanded form is never used: with sparse attention, and in batch-invariant mode, where results
    must not depend on how prompts are chunked and cached."""
    if mla.indexer is not None or options.batch_invariant:
        return None
    return Expansion(
        *(num_heads, mla.kv_rank, mla.rotary_dim, mla.plain_dim, mla.value_dim),
        itemsize=options.dtype.itemsize,
    )


class _HeadProducts:
    """Per-head matmuls, each head with its own weight [K, N].

    Args:
        weights: [heads, K, N].
        batch_invariant: whether a token's result must not depend on other tokens; heads are then
            computed one by one.
    """

    def __init__(self, weights: torch.Tensor, *, batch_invariant: bool) -> None:
        self._weights = weights
        self._packed: list[PackedLinear] = []
        if batch_invariant:
            self._packed = [
                pack_linear_weight(head_weight.T.contiguous(), batch_invariant=True)
                for head_weight in weights
            ]

    def multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Multiplies x [T, heads, K] by the weights and writes the result to `out` [T, heads, N].
        Both tensors may be strided."""
        if not self._packed:
            torch.bmm(x.transpose(0, 1), self._weights, out=out.transpose(0, 1))
        for head, weight in enumerate(self._packed):
            out[:, head] = linear(x[:, head], weight)
