"""Indexer of DeepSeek Sparse Attention (DeepSeek V3.2, arXiv 2512.02556): selects the tokens that a
query attends to."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels import select_tokens, store_index_keys
from worker.models.config.mla_config import IndexerConfig
from worker.models.layers.context import AttentionInputs, KVCache
from worker.models.layers.kv_cache import IndexKeys
from worker.models.layers.linear import ColumnParallelLinear, build_router, whole_part
from worker.models.layers.linear_method import LayerOptions, WeightSlot
from worker.models.layers.norms import LayerNorm

_EPS = 1e-6
"""Epsilon of the norm of keys, which config.json does not set."""


class Indexer:
    """Scores tokens with the queries of several heads and one cached key per token.

    The score is the sum over heads of w * relu(q · k), where q is computed from the latent vector
    of the attention queries, and k and w from the hidden state. The Hadamard transform of the
    published kernels, which prepares q and k for FP8, cancels out in these dot products.

    The indexer is replicated on every rank, since all ranks must select the same tokens.

    Args:
        config: the sparse attention.
        hidden_size: size of the hidden state.
        q_rank: size of the latent vector of queries.
        cos_sin: rotary table of attention, fp32 [positions, rotary dimensions].
        options: options of the model's layers.
    """

    def __init__(
        self,
        config: IndexerConfig,
        hidden_size: int,
        q_rank: int,
        cos_sin: torch.Tensor,
        options: LayerOptions,
    ) -> None:
        self._config, self._cos_sin = config, cos_sin
        self._batch_invariant = options.batch_invariant
        self.keys = IndexKeys(config.head_dim, options.dtype)
        """Index keys that the layer caches."""
        queries = whole_part("wq_b", config.num_heads * config.head_dim)
        self._query = ColumnParallelLinear(q_rank, [queries], bias=False, options=options)
        keys = whole_part("wk", config.head_dim)
        self._key = ColumnParallelLinear(hidden_size, [keys], bias=False, options=options)
        self._key_norm = LayerNorm(config.head_dim, _EPS, options, has_bias=True)
        self._weights = build_router(hidden_size, {"weights_proj": config.num_heads}, options)
        self._scale = (config.head_dim * config.num_heads) ** -0.5

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of all projections and of the norm; `prefix` ends with a dot."""
        for linear in (self._query, self._key, self._weights):
            yield from linear.weight_slots(prefix)
        yield from self._key_norm.weight_slots(f"{prefix}k_norm")

    def process_after_loading(self) -> None:
        """Packs the weights after loading."""
        if self._config.is_interleaved:
            self._put_halves_first()
        for linear in (self._query, self._key, self._weights):
            linear.process_after_loading()

    def run(
        self,
        hidden: torch.Tensor,
        q_latents: torch.Tensor,
        positions: torch.Tensor,
        cache: KVCache,
        inputs: AttentionInputs,
    ) -> None:
        """Writes the keys of a step's tokens to the cache, and selects the tokens that the step's
        queries attend to.

        Args:
            hidden: [T, hidden].
            q_latents: [T, q_rank]: normalized latent vectors of the attention queries.
            positions: [T] int64.
            cache: the layer's KV cache.
            inputs: the step's inputs for the layer, in which the selection is stored.
        """
        assert cache.index_keys is not None, "the layer's specification has index keys"
        store_index_keys(
            *(self._key_norm.forward(self._key.forward(hidden)), cache.index_keys),
            inputs.slot_mapping,
            positions=positions,
            cos_sin_cache=self._cos_sin,
        )
        sparse = inputs.sparse
        if sparse is None:
            return
        if sparse.tokens is not None:
            hidden = hidden.index_select(0, sparse.tokens)
            q_latents = q_latents.index_select(0, sparse.tokens)
        sparse.cells = select_tokens(
            self._query.forward(q_latents).unflatten(-1, (self._config.num_heads, -1)),
            self._weights.forward(hidden.float()) * self._scale,
            *(cache.index_keys, sparse.queries),
            cos_sin_cache=self._cos_sin,
            batch_invariant=self._batch_invariant,
        )

    def _put_halves_first(self) -> None:
        """Reorders the output features of queries and keys so that pairs of rotary dimensions are
        split into two halves instead of interleaved. Scores stay the same, since queries and keys
        are reordered identically."""
        config, rotary_dim = self._config, self._cos_sin.shape[1]
        order = torch.arange(config.head_dim)
        order[:rotary_dim] = order[:rotary_dim].view(-1, 2).T.flatten()
        self._key.reorder(order)
        heads = torch.arange(config.num_heads) * config.head_dim
        self._query.reorder((heads.unsqueeze(1) + order).flatten())
        norm = self._key_norm
        assert norm.bias is not None, "the norm has a bias"
        order = order.to(norm.weight.device)
        norm.weight, norm.bias = norm.weight[order], norm.bias[order]
