"""A checkpoint of each family in which every feature of the family is enabled and has an effect,
and mutations that break each feature."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from tests.support.checkpoints.block_sparse import BLOCK_SPARSE_SPECIMENS
from tests.support.checkpoints.dense_others import DENSE_SPECIMENS
from tests.support.checkpoints.experts import EXPERT_SPECIMENS
from tests.support.checkpoints.gemma3n import GEMMA3N_SPECIMENS
from tests.support.checkpoints.gemma4 import GEMMA4_SPECIMENS
from tests.support.checkpoints.head_kinds import HEAD_KIND_SPECIMENS
from tests.support.checkpoints.hybrids import HYBRID_SPECIMENS
from tests.support.checkpoints.latents import LATENT_SPECIMENS
from tests.support.checkpoints.llama4 import LLAMA4_SPECIMENS
from tests.support.checkpoints.mutations import (
    HEADS_BY_TURNS,
    IN_HALVES,
    NO_DECAY,
    NO_EMBEDDING_SCALE,
    NO_EXPERT_BIASES,
    NO_HEAD_NORMS,
    NO_NAMES,
    NO_NORM_OFFSET,
    NO_QKV_BIAS,
    NO_ROUTER_BIAS,
    NO_SCORE_BIAS,
    NO_SHARED_EXPERT,
    NO_SINKS,
    NO_TAPS,
    NO_UNIT_LENGTH,
    OPEN_GATE,
    SILU,
    SWAPPED_POST_NORMS,
    SWAPPED_SANDWICH,
    UNSCALED_QUERIES,
    WHOLE_SHARE,
    WIDE_NORMS_OF_HEADS,
    always_rotating,
    with_open_gate,
)
from tests.support.checkpoints.published import PUBLISHED_SPECIMENS
from tests.support.checkpoints.recombined import RECOMBINED_SPECIMENS
from tests.support.checkpoints.specimen import (
    LLAMA3_ROPE,
    Model,
    Mutation,
    Patch,
    Specimen,
    Trait,
    write,
)
from tests.support.checkpoints.texts import TEXT_SPECIMENS
from worker.models.layers.moe import MoeNames
from worker.models.layers.norms import RMSNorm

_WINDOW = 21
_ROPE = {"rope_type": "default", "rope_theta": 100.0}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_EPS = {"eps": {"rms_norm_eps": 0.1}}
_THETA = {"theta": {"rope_parameters": {**_ROPE, "rope_theta": 300.0}}}
_WINDOW_PLUS_1 = {"window of one more": {"sliding_window": _WINDOW + 1}}

_TWO_ROPES = {"full_attention": _YARN, "sliding_attention": _ROPE}
_HALF_ROPE = {**_ROPE, "partial_rotary_factor": 0.5}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [2.0, 4.0, 6.0, 8.0],
    "original_max_position_embeddings": 160,
    "partial_rotary_factor": 0.5,
}
_MINISTRAL_ROPE = {
    **_YARN,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.9,
}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "rope_parameters": _HALF_ROPE,
}
_LINEAR_MUTATIONS: dict[str, Mutation] = {
    "gate of attention": OPEN_GATE,
    "weights from 0": NO_NORM_OFFSET,
    "lengths of keys": NO_UNIT_LENGTH,
    "convolution": NO_TAPS,
    "decay": NO_DECAY,
    "share": WHOLE_SHARE,
    "scale of queries": UNSCALED_QUERIES,
    "order of heads": HEADS_BY_TURNS,
    "partial": {"rope_parameters": {**_HALF_ROPE, "partial_rotary_factor": 1.0}},
    **_EPS,
}
_LINEAR_EXPERTS = {
    **_LINEAR,
    "linear_conv_kernel_dim": 3,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
_LINEAR_EXPERTS_MUTATIONS: dict[str, Mutation] = {
    "convolution": NO_TAPS,
    "shared expert": NO_SHARED_EXPERT,
    "its gate": Patch(target="worker.models.layers.moe:MoeMLP.forward", value=with_open_gate),
    "number of experts": {"num_experts_per_tok": 2},
}
_SWAPPED_TABLES = {
    "rope_parameters": {
        "full_attention": _TWO_ROPES["sliding_attention"],
        "sliding_attention": _TWO_ROPES["full_attention"],
    }
}

SPECIMENS: dict[str, Specimen] = {
    "llama": Specimen(
        name="Llama",
        covers=("positions", "cache", "shards"),
        settings={"rope_parameters": LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True},
        mutations={
            "llama3 factor": {"rope_parameters": {**LLAMA3_ROPE, "factor": 2.0}},
            "llama3 border": {"rope_parameters": {**LLAMA3_ROPE, "high_freq_factor": 8.0}},
            **_EPS,
        },
    ),
    "llama-tied": Specimen(
        name="Llama",
        is_variant=True,
        settings={
            "rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0},
            "tie_word_embeddings": True,
        },
        mutations={
            "stretching": {"rope_parameters": _ROPE},
            "untied": {"tie_word_embeddings": False},
        },
        lacks_head_dim=True,
    ),
    "granite": Specimen(
        name="Granite",
        settings={
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.5,
            "residual_multiplier": 0.6,
            "logits_scaling": 0.25,
            "tie_word_embeddings": True,
            "rope_parameters": _ROPE,
        },
        mutations={
            "embedding": {"embedding_multiplier": 1.0},
            "scale of attention": {"attention_multiplier": 0.25},
            "residual": {"residual_multiplier": 1.0},
            "logits": {"logits_scaling": 4.0},
            **_THETA,
        },
        lacks_head_dim=True,
    ),
    "mistral": Specimen(
        name="Mistral",
        covers=("positions",),
        settings={"sliding_window": 37, "rope_parameters": _ROPE},
        mutations={
            "no window": {"sliding_window": None},
            "window of one more": {"sliding_window": 38},
            **_THETA,
        },
    ),
    "phi3": Specimen(
        name="Phi3",
        covers=("shards",),
        settings={
            "rope_parameters": _LONGROPE,
            "max_position_embeddings": 640,
            "original_max_position_embeddings": 160,
            "partial_rotary_factor": 0.5,
            "sliding_window": 37,
        },
        mutations={
            "short factors": {"rope_parameters": {**_LONGROPE, "short_factor": [1.0, 1.5, 2.0, 1]}},
            "temperature": {"rope_parameters": {**_LONGROPE, "attention_factor": 1.0}},
            "partial": {"rope_parameters": _ROPE, "partial_rotary_factor": 1.0},
            "window of one more": {"sliding_window": 38},
            **_EPS,
        },
        lacks_head_dim=True,
    ),
    "gpt-oss": Specimen(
        name="GptOss",
        covers=("positions", "shards", "experts"),
        settings={
            "rope_parameters": {**_YARN, "truncate": False},
            "sliding_window": _WINDOW,
            "layer_types": _ALTERNATING,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "swiglu_limit": 0.5,
        },
        mutations={
            "sinks": NO_SINKS,
            "biases of experts": NO_EXPERT_BIASES,
            "bias of the router": NO_SCORE_BIAS,
            "limit": {"swiglu_limit": 7.0},
            "slope": {"swiglu_alpha": 1.0},
            "number of experts": {"num_experts_per_tok": 2},
            "no bias": NO_QKV_BIAS,
            "borders of yarn": {"rope_parameters": {**_YARN, "truncate": True}},
            **_WINDOW_PLUS_1,
            **_EPS,
        },
    ),
    "gemma": Specimen(
        name="Gemma",
        settings={"rope_parameters": _ROPE, "tie_word_embeddings": True},
        mutations={
            "weights from 0": NO_NORM_OFFSET,
            "scale of embeddings": NO_EMBEDDING_SCALE,
            "activation": SILU,
            **_THETA,
            **_EPS,
        },
    ),
    "gemma2": Specimen(
        name="Gemma2",
        settings={
            "rope_parameters": _ROPE,
            "sliding_window": _WINDOW,
            "layer_types": _ALTERNATING,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": True,
        },
        mutations={
            "cap of attention": {"attn_logit_softcapping": None},
            "another": {"attn_logit_softcapping": 4.0},
            "cap of logits": {"final_logit_softcapping": None},
            "scale of attention": {"query_pre_attn_scalar": 16},
            "norms behind blocks": SWAPPED_SANDWICH,
            **_WINDOW_PLUS_1,
            **_THETA,
        },
    ),
    "gemma3": Specimen(
        name="Gemma3",
        config="Gemma3Text",
        settings={
            "rope_parameters": _TWO_ROPES,
            "sliding_window": _WINDOW,
            "layer_types": _ALTERNATING,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": True,
        },
        mutations={
            "weights from 0": NO_NORM_OFFSET,
            "scale of embeddings": NO_EMBEDDING_SCALE,
            "activation": SILU,
            "norms of heads": NO_HEAD_NORMS,
            "norms behind blocks": SWAPPED_SANDWICH,
            "scale of attention": {"query_pre_attn_scalar": 16},
            "tables of layers": _SWAPPED_TABLES,
            **_WINDOW_PLUS_1,
            **_EPS,
        },
    ),
    "gemma3-images": Specimen(
        name="Gemma3",
        is_variant=True,
        config="Gemma3Text",
        settings={
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100.0},
                "sliding_attention": _ROPE,
            },
            "sliding_window": _WINDOW,
            "layer_types": _ALTERNATING,
            "tie_word_embeddings": True,
        },
        mutations={"names": NO_NAMES, **_WINDOW_PLUS_1},
        multimodal="Gemma3",
    ),
    "qwen2": Specimen(
        name="Qwen2",
        is_variant=True,
        settings={
            "rope_parameters": _YARN,
            "use_sliding_window": True,
            "sliding_window": _WINDOW,
            "layer_types": _ALTERNATING,
            "tie_word_embeddings": True,
        },
        mutations={
            "yarn factor": {"rope_parameters": {**_YARN, "factor": 4.0}},
            "yarn temperature": {"rope_parameters": {**_YARN, "attention_factor": 1.0}},
            "order of windows": {"layer_types": _ALTERNATING[1:] + _ALTERNATING[:1]},
            **_WINDOW_PLUS_1,
        },
        lacks_head_dim=True,
    ),
    "qwen3": Specimen(
        name="Qwen3",
        covers=("alone",),
        settings={
            "rope_parameters": _ROPE,
            "use_sliding_window": True,
            "sliding_window": _WINDOW,
            "layer_types": _ALTERNATING,
        },
        mutations={"norms of heads": NO_HEAD_NORMS, **_EPS, **_THETA, **_WINDOW_PLUS_1},
    ),
    "qwen3-next": Specimen(
        name="Qwen3Next",
        covers=("positions", "cache", "shards", "functions"),
        settings={
            **_LINEAR,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
        mutations={
            **_LINEAR_MUTATIONS,
            "shared expert": NO_SHARED_EXPERT,
            "its gate": Patch(
                target="worker.models.layers.moe:MoeMLP.forward", value=with_open_gate
            ),
            "number of experts": {"num_experts_per_tok": 2},
            "weights of experts": {"norm_topk_prob": False},
        },
    ),
    "qwen3-5": Specimen(
        name="Qwen3_5",
        covers=("shards",),
        config="Qwen3_5Text",
        settings={**_LINEAR, "attention_bias": True, "tie_word_embeddings": True},
        mutations=_LINEAR_MUTATIONS,
    ),
    "qwen3-5-moe": Specimen(
        name="Qwen3_5Moe",
        is_variant=True,
        config="Qwen3_5MoeText",
        settings=_LINEAR_EXPERTS,
        mutations=_LINEAR_EXPERTS_MUTATIONS,
    ),
    "qwen3-5-images": Specimen(
        name="Qwen3_5Moe",
        is_variant=True,
        config="Qwen3_5MoeText",
        settings=_LINEAR_EXPERTS,
        mutations={**_LINEAR_EXPERTS_MUTATIONS, "names": NO_NAMES},
        multimodal="Qwen3_5Moe",
    ),
    "qwen3-5-small-images": Specimen(
        name="Qwen3_5",
        is_variant=True,
        config="Qwen3_5Text",
        settings={**_LINEAR, "tie_word_embeddings": True},
        mutations={"names": NO_NAMES, "convolution": NO_TAPS},
        multimodal="Qwen3_5",
    ),
    "qwen2-5-images": Specimen(
        name="Qwen2_5_VL",
        is_variant=True,
        config="Qwen2_5_VLText",
        settings={"rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}},
        mutations={"names": NO_NAMES, **_THETA, **_EPS},
        multimodal="Qwen2_5_VL",
        lacks_head_dim=True,
    ),
    "qwen3-images": Specimen(
        name="Qwen3VL",
        config="Qwen3VLText",
        settings={
            "rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
            "tie_word_embeddings": True,
        },
        mutations={"names": NO_NAMES, **_THETA, **_EPS},
        multimodal="Qwen3VL",
    ),
    "qwen3-moe": Specimen(
        name="Qwen3Moe",
        settings={
            "rope_parameters": _ROPE,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
        mutations={
            "sum of weights": {"norm_topk_prob": False},
            "number of experts": {"num_experts_per_tok": 2},
            **_THETA,
        },
    ),
    "qwen2-moe": Specimen(
        name="Qwen2Moe",
        covers=("shards", "experts"),
        settings={
            "rope_parameters": _ROPE,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 40,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
        },
        mutations={
            "no bias": NO_QKV_BIAS,
            "sum of weights": {"norm_topk_prob": True},
            "shared expert": NO_SHARED_EXPERT,
            "gate of the shared expert": Patch(
                target="worker.models.layers.moe:MoeMLP.forward", value=with_open_gate
            ),
            **_THETA,
        },
        lacks_head_dim=True,
    ),
    "minimax-m2": Specimen(
        name="MiniMaxM2",
        covers=("shards",),
        settings={
            "rope_parameters": _HALF_ROPE,
            "rotary_dim": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
        },
        mutations={
            "norms of heads": WIDE_NORMS_OF_HEADS,
            "bias of the router": NO_ROUTER_BIAS,
            "partial": {"rope_parameters": _ROPE, "rotary_dim": 16, "partial_rotary_factor": 1.0},
            **_EPS,
        },
    ),
    "ministral": Specimen(
        name="Ministral",
        is_variant=True,
        settings={
            "rope_parameters": _ROPE,
            "sliding_window": _WINDOW,
            "layer_types": _ALTERNATING,
        },
        mutations={
            "order of windows": {"layer_types": _ALTERNATING[1:] + _ALTERNATING[:1]},
            **_WINDOW_PLUS_1,
            **_THETA,
        },
    ),
    "ministral3": Specimen(
        name="Ministral3",
        settings={"rope_parameters": _MINISTRAL_ROPE, "sliding_window": None},
        mutations={
            "beta": {"rope_parameters": {**_MINISTRAL_ROPE, "llama_4_scaling_beta": 0.3}},
            "no beta": {"rope_parameters": {**_MINISTRAL_ROPE, "llama_4_scaling_beta": 0.0}},
            "length": {
                "rope_parameters": {**_MINISTRAL_ROPE, "original_max_position_embeddings": 64}
            },
            "mscale": {"rope_parameters": {**_MINISTRAL_ROPE, "mscale_all_dim": 0.3}},
        },
    ),
    "mistral3": Specimen(
        name="Mistral",
        is_variant=True,
        settings={"rope_parameters": _ROPE, "sliding_window": None},
        mutations={
            "names": NO_NAMES,
            **_THETA,
            **_EPS,
        },
        multimodal="Mistral3",
    ),
    "mistral3-of-ministral3": Specimen(
        name="Ministral3",
        is_variant=True,
        settings={
            "rope_parameters": _MINISTRAL_ROPE,
            "sliding_window": None,
            "tie_word_embeddings": True,
        },
        mutations={
            "no beta": {"rope_parameters": {**_MINISTRAL_ROPE, "llama_4_scaling_beta": 0.0}},
        },
        multimodal="Mistral3",
    ),
    "glm4": Specimen(
        name="Glm4",
        covers=("shards",),
        settings={"rope_parameters": _HALF_ROPE, "attention_bias": True},
        mutations={
            "order of dimensions": IN_HALVES,
            "no bias": NO_QKV_BIAS,
            "norms behind blocks": SWAPPED_SANDWICH,
            "theta": {"rope_parameters": {**_HALF_ROPE, "rope_theta": 300.0}},
            "partial": {
                "rope_parameters": {**_HALF_ROPE, "partial_rotary_factor": 1.0},
                "partial_rotary_factor": 1.0,
            },
        },
    ),
    "glm": Specimen(
        name="Glm",
        settings={"rope_parameters": _HALF_ROPE, "attention_bias": True},
        mutations={
            "order of dimensions": IN_HALVES,
            "no bias": NO_QKV_BIAS,
            "theta": {"rope_parameters": {**_HALF_ROPE, "rope_theta": 300.0}},
        },
    ),
    "glm4-moe": Specimen(
        name="Glm4Moe",
        covers=("shards", "alone"),
        settings={
            "rope_parameters": _HALF_ROPE,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.7,
            "n_group": 4,
            "topk_group": 2,
        },
        mutations={
            "norms of heads": NO_HEAD_NORMS,
            "no bias": NO_QKV_BIAS,
            "shared expert": NO_SHARED_EXPERT,
            "first layer": {"first_k_dense_replace": 0},
            "theta": {"rope_parameters": {**_HALF_ROPE, "rope_theta": 300.0}},
            "partial": {
                "rope_parameters": {**_HALF_ROPE, "partial_rotary_factor": 1.0},
                "partial_rotary_factor": 1.0,
            },
            "scale of experts": {"routed_scaling_factor": 1.0},
            "groups": {"topk_group": 4},
            "sum of weights": {"norm_topk_prob": False},
            "bias of the router": NO_ROUTER_BIAS,
        },
    ),
    "smollm3": Specimen(
        name="SmolLM3",
        settings={
            "rope_parameters": _ROPE,
            "no_rope_layers": [1, 0, 1],
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        mutations={
            "inverted": {"no_rope_layers": [0, 1, 0]},
            "all rotate": {"no_rope_layers": [1, 1, 1]},
            **_THETA,
        },
        lacks_head_dim=True,
    ),
    "seed-oss": Specimen(
        name="SeedOss",
        settings={"rope_parameters": _ROPE, "attention_bias": True, "attention_out_bias": False},
        mutations={"no bias": {"attention_bias": False}, **_THETA, **_EPS},
    ),
    "seed-oss-biases": Specimen(
        name="SeedOss",
        is_variant=True,
        settings={"rope_parameters": _ROPE, "attention_bias": False, "attention_out_bias": True},
        mutations={"no bias": {"attention_out_bias": False}, **_THETA},
    ),
    "olmo2": Specimen(
        name="Olmo2",
        covers=("shards",),
        settings={"rope_parameters": _ROPE},
        mutations={
            "norms of heads": WIDE_NORMS_OF_HEADS,
            "order of norms": SWAPPED_POST_NORMS,
            **_THETA,
            **_EPS,
        },
        lacks_head_dim=True,
    ),
    "olmo3": Specimen(
        name="Olmo3",
        is_variant=True,
        settings={
            "rope_parameters": _TWO_ROPES,
            "sliding_window": _WINDOW,
            "layer_types": _ALTERNATING,
        },
        mutations={
            "tables of layers": _SWAPPED_TABLES,
            "one table": {
                "rope_parameters": dict.fromkeys(_TWO_ROPES, _TWO_ROPES["sliding_attention"])
            },
            **_WINDOW_PLUS_1,
            **_EPS,
        },
        lacks_head_dim=True,
    ),
    "ernie4-5": Specimen(
        name="Ernie4_5",
        settings={"rope_parameters": _ROPE, "tie_word_embeddings": True},
        mutations={"order of dimensions": IN_HALVES, **_THETA},
    ),
    "ernie4-5-moe": Specimen(
        name="Ernie4_5_Moe",
        settings={
            "rope_parameters": _ROPE,
            **{"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 32},
            "moe_layer_end_index": 2,
            "tie_word_embeddings": True,
        },
        mutations={
            "order of dimensions": IN_HALVES,
            "bias of the router": NO_ROUTER_BIAS,
            "shared expert": NO_SHARED_EXPERT,
            "number of experts": {"moe_k": 2},
            "last layer": {"moe_layer_end_index": 1},
            **_THETA,
        },
        lacks_head_dim=True,
    ),
    "exaone4": Specimen(
        name="Exaone4",
        settings={
            "rope_parameters": _ROPE,
            "sliding_window": _WINDOW,
            "layer_types": _ALTERNATING,
        },
        mutations={
            "full layers rotate": Patch(
                target="worker.models.architectures.exaone4:AttentionTraits",
                value=always_rotating,
            ),
            "norms of heads": NO_HEAD_NORMS,
            "order of norms": SWAPPED_POST_NORMS,
            **_WINDOW_PLUS_1,
            **_THETA,
        },
    ),
    "cohere": Specimen(
        name="Cohere",
        settings={"rope_parameters": _ROPE, "logit_scale": 0.5, "layer_norm_eps": 1e-3},
        mutations={
            "logits": {"logit_scale": 1.0},
            "eps": {"layer_norm_eps": 0.1},
            "mean": Patch(target="worker.models.architectures.cohere:LayerNorm", value=RMSNorm),
            "order of dimensions": IN_HALVES,
        },
        lacks_head_dim=True,
    ),
    "cohere2": Specimen(
        name="Cohere2",
        settings={
            "rope_parameters": _ROPE,
            "logit_scale": 0.5,
            "layer_norm_eps": 1e-3,
            "sliding_window": _WINDOW,
            "layer_types": _ALTERNATING,
        },
        mutations={
            "logits": {"logit_scale": 1.0},
            "full layers rotate": Patch(
                target="worker.models.architectures.cohere:AttentionTraits", value=always_rotating
            ),
            "order of dimensions": IN_HALVES,
            **_WINDOW_PLUS_1,
        },
        lacks_head_dim=True,
    ),
    "mixtral": Specimen(
        name="Mixtral",
        settings={
            "rope_parameters": _ROPE,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "sliding_window": 37,
        },
        mutations={
            "number of experts": {"num_experts_per_tok": 2},
            "up and gate": Patch(
                target="worker.models.architectures.mixtral:_NAMES",
                value=MoeNames(gate="w3", up="w1", down="w2"),
            ),
            "window of one more": {"sliding_window": 38},
            **_THETA,
        },
    ),
    **GEMMA3N_SPECIMENS,
    **GEMMA4_SPECIMENS,
    **LLAMA4_SPECIMENS,
    **DENSE_SPECIMENS,
    **LATENT_SPECIMENS,
    **EXPERT_SPECIMENS,
    **HEAD_KIND_SPECIMENS,
    **BLOCK_SPARSE_SPECIMENS,
    **HYBRID_SPECIMENS,
    **RECOMBINED_SPECIMENS,
    **TEXT_SPECIMENS,
    **PUBLISHED_SPECIMENS,
}
"""All test checkpoints, keyed by the family's name in tests."""


def specimens(where: Callable[[Specimen], object]) -> tuple[str, ...]:
    """Names of the test checkpoints with a property."""
    return tuple(name for name, specimen in SPECIMENS.items() if where(specimen))


def cases(trait: Trait, names: Iterable[str] = SPECIMENS) -> list[ParameterSet]:
    """Test checkpoints as parameters of a test; `make test` runs those that cover the trait."""
    return [
        pytest.param(name, marks=() if trait in SPECIMENS[name].covers else pytest.mark.long)
        for name in names
    ]


def write_specimen(name: str, folder: Path) -> Model:
    """Saves the checkpoint and returns its reference model."""
    return write(SPECIMENS[name], folder)
