"""Checkpoints of families with multi-head latent attention, and mutations that break each of
their features."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kernels import (
    ExtraTerms,
    LatentRows,
    prepare_latents,
    select_tokens,
    store_index_keys,
)
from tests.support.checkpoints.mutations import NO_ROUTER_BIAS, NO_SHARED_EXPERT
from tests.support.checkpoints.specimen import Mutation, Patch, Specimen
from worker.models.architectures.deepseek import LatentAttention
from worker.models.architectures.llama import PreNormLayer
from worker.models.config.mla_config import IndexerConfig
from worker.models.layers.norms import RMSNorm

_ROPE = {"rope_type": "default", "rope_theta": 100.0}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 2.0,
}
"""Different magnitudes, so that both cosines and dot products change."""
_BETA = {**_YARN, "llama_4_scaling_beta": 0.9, "partial_rotary_factor": 8 / 20}
LATENTS = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.7,
}


def _without_norm(
    q: torch.Tensor,
    queries: torch.Tensor,
    rows: LatentRows,
    cache: torch.Tensor,
    slots: torch.Tensor,
    **options: Any,
) -> None:
    prepare_latents(q, queries, rows, cache, slots, **options)
    value_dim = rows.latents.shape[1]
    cache.view(-1, cache.shape[3])[slots, :value_dim] = rows.latents


def _without_query_norm(self: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    return x if self.weight.shape[0] == LATENTS["q_lora_rank"] else _NORM(self, x)


def _with_wide_scale(self: LatentAttention, *args: Any, **options: Any) -> None:
    """Scales dot products as if they were those of the vectors in the cache."""
    _INIT(self, *args, **options)
    self._scale *= (self._mla.query_dim / self._mla.cached_dim) ** 0.5


def _without_zero_experts(**fields: Any) -> ExtraTerms:
    return ExtraTerms(**{**fields, "first_zero_expert": None})


def _without_zero_expert_weights(
    tensors: dict[str, torch.Tensor], _: Any
) -> dict[str, torch.Tensor]:
    """Drops weights of zero experts, which transformers saves."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not any(f".experts.{index}." in name for index in (6, 7, 8))
    }


_OF_LONGCAT = (
    *("order of dimensions", "norms of latents", "norms of queries", "eps of these norms", "scale"),
    "scale of experts",
)
_NORM, _INIT = RMSNorm.forward, LatentAttention.__init__
_OF_LATENTS: dict[str, Mutation] = {
    "order of dimensions": Patch(
        target="worker.models.architectures.deepseek:LatentAttention._put_halves_first",
        value=lambda _: None,
    ),
    "norms of latents": Patch(
        target="worker.models.architectures.deepseek:prepare_latents", value=_without_norm
    ),
    "norms of queries": Patch(
        target="worker.models.layers.norms:RMSNorm.forward", value=_without_query_norm
    ),
    "eps of these norms": Patch(target="worker.models.architectures.deepseek:_EPS", value=0.05),
    "scale": Patch(
        target="worker.models.architectures.deepseek:LatentAttention.__init__",
        value=_with_wide_scale,
    ),
    "shared expert": NO_SHARED_EXPERT,
    "scale of experts": {"routed_scaling_factor": 1.0},
    "number of experts": {"num_experts_per_tok": 2},
}
_OF_YARN: dict[str, Mutation] = {
    "theta": {"rope_parameters": {**_YARN, "rope_theta": 300.0}},
    "stretching": {"rope_parameters": _ROPE},
    "scale of products": {"rope_parameters": {**_YARN, "mscale_all_dim": 0.7}},
    "scale of cosines": {"rope_parameters": {**_YARN, "mscale": 2.0}},
    "no scale of products": Patch(
        target="worker.models.config.latent_family:score_factor", value=lambda *_: 1.0
    ),
}
_OF_V3: dict[str, Mutation] = {
    **_OF_LATENTS,
    "bias of the router": NO_ROUTER_BIAS,
    "groups": {"topk_group": 4},
    "sum of weights": {"norm_topk_prob": False},
}

_INDEXER = {"index_topk": 8, "index_n_heads": 32, "index_head_dim": 16}
"""Settings of the indexer. With fewer heads, many scores would be equal, and transformers' choice
between them depends on the batch."""
_OF_INDEXER: dict[str, Mutation] = {
    "number of tokens": {"index_topk": 9},
    "weights of the indexer's heads": Patch(
        target="worker.models.layers.indexer:select_tokens",
        value=lambda q, weights, *args, **options: select_tokens(
            q, torch.ones_like(weights), *args, **options
        ),
    ),
    "norm of index keys": Patch(target="worker.models.layers.indexer:_EPS", value=5.0),
    "rotation of index keys": Patch(
        target="worker.models.layers.indexer:store_index_keys",
        value=lambda *args, positions, **options: store_index_keys(
            *args, positions=torch.zeros_like(positions), **options
        ),
    ),
}

LATENT_SPECIMENS: dict[str, Specimen] = {
    "deepseek-v2": Specimen(
        name="DeepseekV2",
        is_variant=True,
        settings={
            **LATENTS,
            **EXPERTS,
            "rope_parameters": _YARN,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
        },
        mutations={
            **_OF_LATENTS,
            **_OF_YARN,
            "groups": {"topk_method": "greedy"},
            "sum of two": Patch(
                target="worker.models.config.model_config:checked",
                value=lambda moe, _: replace(moe, num_summed=2),
            ),
            "first layer": {"first_k_dense_replace": 0},
        },
        lacks_head_dim=True,
    ),
    "deepseek-v2-lite": Specimen(
        name="DeepseekV2",
        covers=("shards",),
        settings={
            **LATENTS,
            **EXPERTS,
            "rope_parameters": _YARN,
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
        },
        mutations={
            **{key: value for key, value in _OF_LATENTS.items() if key != "norms of queries"},
            **_OF_YARN,
            "first layer": {"first_k_dense_replace": 0},
        },
        lacks_head_dim=True,
    ),
    "deepseek-v3": Specimen(
        name="DeepseekV3",
        covers=("shards", "experts", "functions"),
        settings={
            **LATENTS,
            **EXPERTS,
            "rope_parameters": _YARN,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
        },
        mutations={
            **_OF_V3,
            **_OF_YARN,
            "best of a group": Patch(
                target="worker.models.config.model_config:checked",
                value=lambda moe, _: replace(moe, num_summed=1),
            ),
            "first layer": {"first_k_dense_replace": 0},
        },
        lacks_head_dim=True,
    ),
    "glm4-moe-lite": Specimen(
        name="Glm4MoeLite",
        is_variant=True,
        settings={
            **LATENTS,
            **EXPERTS,
            "rope_parameters": _ROPE,
            "n_shared_experts": 1,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "n_group": 4,
            "topk_group": 2,
        },
        mutations={
            **_OF_V3,
            "theta": {"rope_parameters": {**_ROPE, "rope_theta": 300.0}},
            "kinds of layers": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
        },
        lacks_head_dim=True,
    ),
    "mistral4": Specimen(
        name="Mistral4",
        is_variant=True,
        settings={
            **LATENTS,
            **EXPERTS,
            "rope_parameters": _BETA,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
        },
        mutations={
            **{key: value for key, value in _OF_V3.items() if key != "bias of the router"},
            "beta": {"rope_parameters": {**_BETA, "llama_4_scaling_beta": 0.1}},
            "length": {"rope_parameters": {**_BETA, "original_max_position_embeddings": 32}},
            "theta": {"rope_parameters": {**_BETA, "rope_theta": 300.0}},
            "best of a group": Patch(
                target="worker.models.config.model_config:checked",
                value=lambda moe, _: replace(moe, num_summed=1),
            ),
            "first layer": {"first_k_dense_replace": 0},
        },
        lacks_head_dim=True,
    ),
    "longcat": Specimen(
        name="LongcatFlash",
        settings={
            **LATENTS,
            "num_hidden_layers": 4,
            "head_dim": 8,
            "rope_parameters": _ROPE,
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 32,
            "n_routed_experts": 6,
            "zero_expert_num": 3,
            "moe_topk": 3,
            "routed_scaling_factor": 1.7,
        },
        mutations={
            **{key: value for key, value in _OF_LATENTS.items() if key in _OF_LONGCAT},
            "scale of latents": Patch(
                target="worker.models.architectures.longcat:ScaledLatentAttention.process_after_loading",
                value=LatentAttention.process_after_loading,
            ),
            "shortcut": Patch(
                target="worker.models.architectures.longcat:SecondHalf.feed_forward",
                value=PreNormLayer.feed_forward,
            ),
            "zero experts": Patch(
                target="worker.models.layers.moe:ExtraTerms", value=_without_zero_experts
            ),
            "bias of the router": NO_ROUTER_BIAS,
            "number of experts": {"moe_topk": 2},
            "theta": {"rope_parameters": {**_ROPE, "rope_theta": 300.0}},
        },
        rewrite=_without_zero_expert_weights,
    ),
    "deepseek-halves": Specimen(
        name="DeepseekV3",
        is_variant=True,
        settings={
            **LATENTS,
            **EXPERTS,
            "rope_parameters": _ROPE,
            "rope_interleave": False,
            "n_shared_experts": 1,
            "first_k_dense_replace": 2,
            "n_group": 1,
            "topk_group": 1,
        },
        mutations={
            "order of dimensions": {"rope_interleave": True},
            "first layers": {"first_k_dense_replace": 1},
        },
        lacks_head_dim=True,
    ),
    "deepseek-v3.2": Specimen(
        name="DeepseekV32",
        covers=("positions", "cache", "shards"),
        settings={
            **LATENTS,
            **EXPERTS,
            **_INDEXER,
            "rope_parameters": _YARN,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
        },
        mutations={
            **_OF_V3,
            **_OF_YARN,
            **_OF_INDEXER,
            "first layer": {"first_k_dense_replace": 0, "mlp_layer_types": None},
            "order of the indexer's dimensions": Patch(
                target="worker.models.config.vendors.deepseek:IndexerConfig",
                value=lambda **fields: IndexerConfig(**{**fields, "is_interleaved": True}),
            ),
        },
        lacks_head_dim=True,
    ),
    "glm-5": Specimen(
        name="GlmMoeDsa",
        settings={
            **LATENTS,
            **EXPERTS,
            **_INDEXER,
            "num_hidden_layers": 4,
            "rope_parameters": _ROPE,
            "n_shared_experts": 1,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "indexer_types": ["full", "shared", "full", "shared"],
        },
        mutations={
            **{key: value for key, value in _OF_V3.items() if key != "groups"},
            **_OF_INDEXER,
            "theta": {"rope_parameters": {**_ROPE, "rope_theta": 300.0}},
            "order of the indexer's dimensions": Patch(
                target="worker.models.layers.indexer:Indexer._put_halves_first",
                value=lambda _: None,
            ),
        },
        lacks_head_dim=True,
    ),
}
