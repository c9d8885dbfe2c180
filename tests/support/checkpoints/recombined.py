"""Checkpoints of families whose layers combine those of other families, and mutations that break
each of their features."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.support.checkpoints.latents import EXPERTS, LATENTS
from tests.support.checkpoints.mutations import (
    NO_DECAY,
    NO_HEAD_NORMS,
    NO_NORM_BIAS,
    NO_QKV_BIAS,
    NO_ROUTER_BIAS,
    NO_SHARED_EXPERT,
    NO_SINKS,
    NO_TAPS,
    NO_UNIT_LENGTH,
    RMS_FOR_LAYER_NORM,
    SWAPPED_POST_NORMS,
    SWAPPED_SANDWICH,
    WIDE_NORMS_OF_HEADS,
)
from tests.support.checkpoints.specimen import LLAMA3_ROPE, Mutation, Patch, Specimen

_WINDOW = 21
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_ROPE = {"rope_type": "default", "rope_theta": 100.0}
_THETA: dict[str, Mutation] = {"theta": {"rope_parameters": {**_ROPE, "rope_theta": 300.0}}}
_EPS: dict[str, Mutation] = {"eps": {"rms_norm_eps": 0.1}}
_FEWER: dict[str, Mutation] = {"number of experts": {"num_experts_per_tok": 2}}
_WINDOW_PLUS_1: dict[str, Mutation] = {"window of one more": {"sliding_window": _WINDOW + 1}}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 2.0,
}
_TWO_ROPES = {"full_attention": {**_YARN, "attention_factor": 1.2}, "sliding_attention": _ROPE}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [2.0, 4.0, 6.0, 8.0],
    "original_max_position_embeddings": 160,
}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.5,
    "residual_multiplier": 0.6,
    "logits_scaling": 0.25,
    "rope_parameters": _ROPE,
}
_GRANITE_MUTATIONS: dict[str, Mutation] = {
    "embedding": {"embedding_multiplier": 1.0},
    "scale of attention": {"attention_multiplier": 0.25},
    "residual": {"residual_multiplier": 1.0},
    "logits": {"logits_scaling": 4.0},
}
_GRANITE_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24}
_NO_SHARED_MLP = Patch(
    target="worker.models.architectures.granite:GatedMLP.forward_share",
    value=lambda _, hidden: torch.zeros_like(hidden),
)
_OF_LATENTS: dict[str, Mutation] = {
    "eps of norms within attention": Patch(
        target="worker.models.architectures.deepseek:_EPS", value=0.05
    ),
    **_EPS,
}


def _whole_convolutions(tensors: dict[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
    """Splits the convolution's weight by the sizes of queries, keys and values, whereas
    transformers saves three equal parts."""
    for index, layer in enumerate(model.model.layers):
        if mixer := getattr(layer, "linear_attn", None):
            sizes = [mixer.key_dim, mixer.key_dim, mixer.value_dim]
            for part, weight in zip("qkv", mixer.conv1d.weight.split(sizes), strict=True):
                tensors[f"model.layers.{index}.linear_attn.{part}_conv1d.weight"] = weight
    return tensors


def _with_constants(tensors: dict[str, torch.Tensor], _: Any) -> dict[str, torch.Tensor]:
    """Adds causal masks and frequencies, as in the first releases of Pythia."""
    layer = "gpt_neox.layers.0.attention"
    parts = ("bias", "masked_bias", "rotary_emb.inv_freq")
    return {**tensors, **{f"{layer}.{part}": torch.ones(3) for part in parts}}


_OLMO_HYBRID = Specimen(
    name="OlmoHybrid",
    covers=("shards",),
    settings={
        "rope_parameters": _ROPE,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 20,
        "linear_conv_kernel_dim": 3,
    },
    mutations={
        "step sizes up to 2": {"linear_allow_neg_eigval": False},
        "lengths of keys": NO_UNIT_LENGTH,
        "convolution": NO_TAPS,
        "decay": NO_DECAY,
        "eps of outputs": Patch(
            target="worker.models.architectures.olmo_hybrid:_NORM_EPS", value=0.05
        ),
        "norms of heads": WIDE_NORMS_OF_HEADS,
        "order of norms": SWAPPED_POST_NORMS,
        **_THETA,
        **_EPS,
    },
    rewrite=_whole_convolutions,
    lacks_head_dim=True,
)

_GPT_NEOX = Specimen(
    name="GPTNeoX",
    settings={
        "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5},
        "num_key_value_heads": 4,
        "layer_norm_eps": 1e-3,
    },
    mutations={
        "no bias": NO_QKV_BIAS,
        "eps": {"layer_norm_eps": 0.1},
        "bias of norms": NO_NORM_BIAS,
        "mean": RMS_FOR_LAYER_NORM,
        "one block after the other": {"use_parallel_residual": False},
        "activation": Patch(target="kernels.rowwise:gelu", value=torch.relu),
        "theta": {"rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": 0.5}},
        "partial": {"rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0}},
    },
    rewrite=_with_constants,
    lacks_head_dim=True,
)

RECOMBINED_SPECIMENS: dict[str, Specimen] = {
    "gpt-neox": _GPT_NEOX,
    "gpt-neox-serial": replace(
        _GPT_NEOX,
        settings={
            **_GPT_NEOX.settings,
            "use_parallel_residual": False,
            "hidden_act": "gelu_fast",
        },
        mutations={
            "parallel blocks": {"use_parallel_residual": True},
            "activation": Patch(target="kernels.rowwise:gelu_tanh", value=torch.relu),
        },
        is_variant=True,
    ),
    "cwm": Specimen(
        name="Cwm",
        settings={
            "rope_parameters": LLAMA3_ROPE,
            "sliding_window": _WINDOW,
            "layer_types": _ALTERNATING,
        },
        mutations={
            "stretching": {"rope_parameters": {**LLAMA3_ROPE, "factor": 2.0}},
            **_WINDOW_PLUS_1,
            **_EPS,
        },
        is_variant=True,
    ),
    "dots1": Specimen(
        name="Dots1",
        settings={
            **EXPERTS,
            "rope_parameters": _ROPE,
            "sliding_window": _WINDOW,
            "layer_types": _ALTERNATING,
            "attention_bias": False,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
        },
        mutations={
            "norms of heads": NO_HEAD_NORMS,
            "shared expert": NO_SHARED_EXPERT,
            "bias of the router": NO_ROUTER_BIAS,
            "scale of experts": {"routed_scaling_factor": 1.0},
            "groups": {"topk_group": 4},
            "sum of weights": {"norm_topk_prob": False},
            "first layer": {"first_k_dense_replace": 0},
            **_WINDOW_PLUS_1,
            **_FEWER,
            **_THETA,
            **_EPS,
        },
        lacks_head_dim=True,
        is_variant=True,
    ),
    "mellum": Specimen(
        name="Mellum",
        settings={
            "rope_parameters": _TWO_ROPES,
            "sliding_window": _WINDOW,
            "layer_types": _ALTERNATING,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
        },
        mutations={
            "norms of heads": NO_HEAD_NORMS,
            "one table": {
                "rope_parameters": dict.fromkeys(_TWO_ROPES, _TWO_ROPES["sliding_attention"])
            },
            "kinds of layers": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
            "sum of weights": {"norm_topk_prob": False},
            **_WINDOW_PLUS_1,
            **_FEWER,
            **_EPS,
        },
        is_variant=True,
    ),
    "jais2": Specimen(
        name="Jais2",
        settings={"rope_parameters": _ROPE, "layer_norm_eps": 1e-3},
        mutations={
            "no bias": NO_QKV_BIAS,
            "no bias of MLPs": {"mlp_bias": False},
            "eps": {"layer_norm_eps": 0.1},
            "activation": Patch(
                target="worker.models.architectures.nemotron:squared_relu", value=torch.relu
            ),
            "bias of norms": NO_NORM_BIAS,
            "mean": RMS_FOR_LAYER_NORM,
            **_THETA,
        },
        is_variant=True,
    ),
    "hyperclovax": Specimen(
        name="HyperCLOVAX",
        settings=_GRANITE,
        mutations={
            **_GRANITE_MUTATIONS,
            "norms after the blocks": {"use_post_norm": False},
            "order of norms": SWAPPED_SANDWICH,
            **_THETA,
            **_EPS,
        },
    ),
    "hyperclovax-without-post-norm": Specimen(
        name="HyperCLOVAX",
        settings={**_GRANITE, "use_post_norm": False, "attention_multiplier": None},
        mutations={"residual": {"residual_multiplier": 1.0}, **_THETA},
        is_variant=True,
    ),
    "youtu": Specimen(
        name="Youtu",
        settings={**LATENTS, "rope_parameters": _YARN},
        mutations={
            **_OF_LATENTS,
            "order of dimensions": {"rope_interleave": False},
            "scale of products": {"rope_parameters": {**_YARN, "mscale_all_dim": 0.7}},
        },
        lacks_head_dim=True,
        is_variant=True,
    ),
    "minicpm3": Specimen(
        name="MiniCPM3",
        settings={
            **LATENTS,
            "rope_parameters": _LONGROPE,
            "max_position_embeddings": 640,
            "tie_word_embeddings": True,
            "scale_emb": 3.0,
            "scale_depth": 1.1,
            "dim_model_base": 256,
        },
        mutations={
            **_OF_LATENTS,
            "embedding": {"scale_emb": 1.0},
            "residual": {"scale_depth": 1.7},
            "logits": {"dim_model_base": 128},
            "short factors": {"rope_parameters": {**_LONGROPE, "short_factor": [1.0] * 4}},
            "temperature": {"rope_parameters": {**_LONGROPE, "attention_factor": 1.0}},
        },
        lacks_head_dim=True,
    ),
    "granite-moe-shared": Specimen(
        name="GraniteMoeShared",
        settings={**_GRANITE, **_GRANITE_EXPERTS, "shared_intermediate_size": 40},
        mutations={
            **_GRANITE_MUTATIONS,
            "shared MLP": _NO_SHARED_MLP,
            **_FEWER,
            **_THETA,
            **_EPS,
        },
        lacks_head_dim=True,
        is_variant=True,
    ),
    "granite-moe-swa": Specimen(
        name="GraniteMoeSWA",
        settings={
            **_GRANITE,
            **_GRANITE_EXPERTS,
            "shared_intermediate_size": 40,
            "layer_types": _ALTERNATING,
            "sliding_window": _WINDOW,
            "layer_rope_theta": [100.0, 0.0, 30.0],
        },
        mutations={
            **_GRANITE_MUTATIONS,
            "sinks": NO_SINKS,
            "shared MLP": _NO_SHARED_MLP,
            "all rotate": {"layer_rope_theta": [100.0, 100.0, 30.0]},
            **_WINDOW_PLUS_1,
            **_FEWER,
            **_EPS,
        },
        lacks_head_dim=True,
        is_variant=True,
    ),
    "granite-moe-swa-without-mlp": Specimen(
        name="GraniteMoeSWA",
        settings={
            **_GRANITE,
            **_GRANITE_EXPERTS,
            "layer_types": _ALTERNATING,
            "sliding_window": _WINDOW,
        },
        mutations={"sinks": NO_SINKS, "base of all layers": {"layer_rope_theta": [30.0] * 3}},
        lacks_head_dim=True,
        is_variant=True,
    ),
    "olmo-hybrid": _OLMO_HYBRID,
    "olmo-hybrid-without-rotation": replace(
        _OLMO_HYBRID,
        covers=(),
        settings={
            **_OLMO_HYBRID.settings,
            "rope_parameters": {**_ROPE, "rope_theta": None},
            "linear_allow_neg_eigval": False,
        },
        mutations={
            "rotary embedding": {"rope_parameters": _ROPE},
            "step sizes up to 1": {"linear_allow_neg_eigval": True},
        },
        is_variant=True,
    ),
}
"""Test checkpoints, keyed by the family's name in tests."""
