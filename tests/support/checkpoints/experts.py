"""Checkpoints of families whose experts are those of another family with other tensors, and
mutations that break each of their features."""

from __future__ import annotations

from tests.support.checkpoints.mutations import (
    NO_QKV_BIAS,
    NO_ROUTER_BIAS,
    NO_SHARED_EXPERT,
    SWAPPED_POST_NORMS,
    WIDE_NORMS_OF_HEADS,
)
from tests.support.checkpoints.specimen import Mutation, Patch, Specimen
from worker.models.architectures.hunyuan_moe import _TRAITS
from worker.models.layers.attention import AttentionTraits

_ROPE = {"rope_type": "default", "rope_theta": 100.0}
_THETA: dict[str, Mutation] = {"theta": {"rope_parameters": {**_ROPE, "rope_theta": 300.0}}}
_ALPHA = {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 20.0, "factor": 1.0}
_EPS: dict[str, Mutation] = {"eps": {"rms_norm_eps": 0.1}}
_FEWER: dict[str, Mutation] = {"number of experts": {"num_experts_per_tok": 2}}


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
"""By the family's name in tests."""
