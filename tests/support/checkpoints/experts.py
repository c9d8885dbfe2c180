"""Checkpoints of families that have another family's experts in a different tensor layout, and
mutations that break each of their features."""

from __future__ import annotations

from tests.support.checkpoints.mutations import (
    IN_HALVES,
    NO_HEAD_NORMS,
    NO_NORM_BIAS,
    NO_QKV_BIAS,
    NO_ROUTER_BIAS,
    NO_SHARED_EXPERT,
    OPEN_GATE,
    RMS_FOR_LAYER_NORM,
    SWAPPED_POST_NORMS,
    SWAPPED_SANDWICH,
    WIDE_NORMS_OF_HEADS,
    always_rotating,
)
from tests.support.checkpoints.specimen import Mutation, Patch, Specimen
from worker.models.architectures.hunyuan_moe import _TRAITS
from worker.models.layers.attention import AttentionTraits
from worker.models.layers.moe import MoeMLP
from worker.models.layers.norms import RMSNorm

_WINDOW = 21
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_ROPE = {"rope_type": "default", "rope_theta": 100.0}
_THETA: dict[str, Mutation] = {"theta": {"rope_parameters": {**_ROPE, "rope_theta": 300.0}}}
_ALPHA = {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 20.0, "factor": 1.0}
_EPS: dict[str, Mutation] = {"eps": {"rms_norm_eps": 0.1}}
_FEWER: dict[str, Mutation] = {"number of experts": {"num_experts_per_tok": 2}}


_K_EXAONE = Specimen(
    name="ExaoneMoe",
    settings={
        "rope_parameters": _ROPE,
        "sliding_window": _WINDOW,
        "layer_types": _ALTERNATING,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "num_shared_experts": 1,
        "routed_scaling_factor": 1.7,
        "n_group": 4,
        "topk_group": 2,
    },
    mutations={
        "full layers rotate": Patch(
            target="worker.models.architectures.exaone4:AttentionTraits", value=always_rotating
        ),
        "norms of heads": NO_HEAD_NORMS,
        "shared expert": NO_SHARED_EXPERT,
        "bias of the router": NO_ROUTER_BIAS,
        "scale of experts": {"routed_scaling_factor": 1.0},
        "groups": {"topk_group": 4},
        "sum of weights": {"norm_topk_prob": False},
        "window of one more": {"sliding_window": _WINDOW + 1},
        **_FEWER,
        **_THETA,
        **_EPS,
    },
    is_variant=True,
)
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5, 1.0, 1.5, 2.0, 2.5],
    "long_factor": [2.0] * 8,
    "short_mscale": 1.3,
    "long_mscale": 1.5,
    "original_max_position_embeddings": 160,
}
_PHIMOE = Specimen(
    name="Phimoe",
    settings={
        "rope_parameters": _LONGROPE,
        "max_position_embeddings": 640,
        "sliding_window": 37,
        "attention_bias": True,
        "lm_head_bias": True,
        "num_local_experts": 8,
        "router_jitter_noise": 0.3,
    },
    mutations={
        "bias of norms": NO_NORM_BIAS,
        "mean": RMS_FOR_LAYER_NORM,
        "no bias": NO_QKV_BIAS,
        "short factors": {"rope_parameters": {**_LONGROPE, "short_factor": [1.0] * 8}},
        "temperature": {"rope_parameters": {**_LONGROPE, "short_mscale": 1.0}},
        "tolerance": {"router_jitter_noise": 0.01},
        "softmax over all": Patch(
            target="worker.models.architectures.phimoe:SparseMixerMLP._choose",
            value=MoeMLP._choose,
        ),
        "window of one more": {"sliding_window": 38},
        **_EPS,
    },
    lacks_head_dim=True,
    is_variant=True,
)

EXPERT_SPECIMENS: dict[str, Specimen] = {
    "granite-moe": Specimen(
        name="GraniteMoe",
        settings={
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.5,
            "residual_multiplier": 0.6,
            "logits_scaling": 0.25,
            "tie_word_embeddings": True,
            "rope_parameters": _ROPE,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
        },
        mutations={
            "embedding": {"embedding_multiplier": 1.0},
            "scale of attention": {"attention_multiplier": 0.25},
            "residual": {"residual_multiplier": 1.0},
            "logits": {"logits_scaling": 4.0},
            **_FEWER,
            **_THETA,
        },
        lacks_head_dim=True,
    ),
    "flex-olmo": Specimen(
        name="FlexOlmo",
        settings={
            "rope_parameters": _ROPE,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
        },
        mutations={
            "norms of heads": WIDE_NORMS_OF_HEADS,
            "order of norms": SWAPPED_POST_NORMS,
            **_FEWER,
            **_THETA,
            **_EPS,
        },
        lacks_head_dim=True,
    ),
    "solar-open": Specimen(
        name="SolarOpen",
        is_variant=True,
        settings={
            "rope_parameters": _ROPE,
            "attention_bias": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.7,
            "n_group": 4,
            "topk_group": 2,
        },
        mutations={
            "no bias": NO_QKV_BIAS,
            "shared expert": NO_SHARED_EXPERT,
            "scale of experts": {"routed_scaling_factor": 1.0},
            "groups": {"topk_group": 4},
            "sum of weights": {"norm_topk_prob": False},
            "bias of the router": NO_ROUTER_BIAS,
            **_FEWER,
            **_THETA,
        },
    ),
    "olmoe": Specimen(
        name="Olmoe",
        settings={"rope_parameters": _ROPE, "num_experts": 8, "num_experts_per_tok": 3},
        mutations={
            "norms of heads": WIDE_NORMS_OF_HEADS,
            "sum of weights": {"norm_topk_prob": True},
            **_FEWER,
            **_THETA,
            **_EPS,
        },
        lacks_head_dim=True,
        is_variant=True,
    ),
    "hy3": Specimen(
        name="HYV3",
        settings={
            "rope_parameters": _ROPE,
            "attention_bias": True,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "num_shared_experts": 2,
            "router_scaling_factor": 1.7,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
        mutations={
            "norms of heads": NO_HEAD_NORMS,
            "no bias": NO_QKV_BIAS,
            "shared expert": NO_SHARED_EXPERT,
            "bias of the router": NO_ROUTER_BIAS,
            "scale of experts": {"router_scaling_factor": 1.0},
            "dense layers": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
            **_FEWER,
            **_THETA,
            **_EPS,
        },
        is_variant=True,
    ),
    "k-exaone": _K_EXAONE,
    "trinity": Specimen(
        name="Afmoe",
        covers=("shards",),
        settings={
            "rope_parameters": _ROPE,
            "sliding_window": _WINDOW,
            "layer_types": _ALTERNATING,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "num_shared_experts": 2,
            "num_dense_layers": 1,
            "route_scale": 1.7,
            "mup_enabled": True,
        },
        mutations={
            "gate of attention": OPEN_GATE,
            "norms of heads": NO_HEAD_NORMS,
            "norms behind blocks": SWAPPED_SANDWICH,
            "embedding": {"mup_enabled": False},
            "full layers rotate": Patch(
                target="worker.models.architectures.afmoe:AttentionTraits", value=always_rotating
            ),
            "shared expert": NO_SHARED_EXPERT,
            "bias of the router": NO_ROUTER_BIAS,
            "scale of experts": {"route_scale": 1.0},
            "dense layers": {"num_dense_layers": 0},
            "window of one more": {"sliding_window": _WINDOW + 1},
            **_FEWER,
            **_THETA,
            **_EPS,
        },
    ),
    "cohere2-moe": Specimen(
        name="Cohere2Moe",
        settings={
            "rope_parameters": _ROPE,
            "logit_scale": 0.5,
            "layer_norm_eps": 1e-3,
            "rms_norm_eps": None,
            "sliding_window": _WINDOW,
            "layer_types": _ALTERNATING,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "prefix_dense_intermediate_size": 40,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
        },
        mutations={
            "logits": {"logit_scale": 1.0},
            "order of dimensions": IN_HALVES,
            "mean": Patch(target="worker.models.architectures.cohere:LayerNorm", value=RMSNorm),
            "dense layer rotates": {"prefix_dense_sliding_window_pattern": 2},
            "shared expert": NO_SHARED_EXPERT,
            "average": {"shared_expert_combination_strategy": "sum"},
            "scores": {"expert_selection_fn": "sigmoid"},
            "window of one more": {"sliding_window": _WINDOW + 1},
            **_FEWER,
            **_THETA,
        },
        is_variant=True,
    ),
    "cohere2-moe-sigmoid": Specimen(
        name="Cohere2Moe",
        settings={
            "rope_parameters": _ROPE,
            "logit_scale": 0.5,
            "rms_norm_eps": 1e-3,
            "sliding_window": _WINDOW,
            "layer_types": _ALTERNATING,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_shared_experts": 1,
            "shared_expert_combination_strategy": "sum",
            "expert_selection_fn": "sigmoid",
            "norm_topk_prob": False,
        },
        mutations={
            "full layers rotate": Patch(
                target="worker.models.architectures.cohere:AttentionTraits", value=always_rotating
            ),
            "norm": {"rms_norm_eps": None, "layer_norm_eps": 1e-3},
            "sum": {"shared_expert_combination_strategy": "average"},
            "scores": {"expert_selection_fn": "softmax"},
            "sum of weights": {"norm_topk_prob": True},
            **_FEWER,
            **_EPS,
        },
        is_variant=True,
    ),
    "phimoe": _PHIMOE,
    "hunyuan-moe": Specimen(
        name="HunYuanMoEV1",
        settings={
            "rope_parameters": _ALPHA,
            "num_experts": 8,
            "moe_topk": 3,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        mutations={
            "alpha": {"rope_parameters": {**_ALPHA, "alpha": 2.0}},
            "order of norms": Patch(
                target="worker.models.architectures.hunyuan_moe:_TRAITS",
                value=AttentionTraits(names=_TRAITS.names),
            ),
            "no bias": NO_QKV_BIAS,
            "shared expert": NO_SHARED_EXPERT,
            "number of experts": {"moe_topk": 2},
            **_EPS,
        },
    ),
}
"""Test checkpoints, keyed by the family's name in tests."""
