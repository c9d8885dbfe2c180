"""Checkpoints of families whose heads differ between full-attention and sliding-window layers, and
mutations that break each of their features."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.support.checkpoints.mutations import (
    NO_HEAD_NORMS,
    NO_NORM_OFFSET,
    NO_QKV_BIAS,
    NO_ROUTER_BIAS,
    NO_SHARED_EXPERT,
    NO_SINKS,
    OPEN_GATE,
)
from tests.support.checkpoints.specimen import LLAMA3_ROPE, Mutation, Patch, Specimen

_WINDOW = 21
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_FULL_ROPE = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
_WINDOW_ROPE = {"rope_type": "default", "rope_theta": 30.0}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}
_SAME_SHARES = {"partial_rotary_factor": 0.5}
_COMMON: dict[str, Mutation] = {
    "number of experts": {"num_experts_per_tok": 2},
    "window of one more": {"sliding_window": _WINDOW + 1},
    "eps": {"rms_norm_eps": 0.1},
    "bias of the router": NO_ROUTER_BIAS,
}


def _fused(tensors: dict[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
    """Stores q, k and v in one tensor by groups of heads, like MiMo V2.5 Pro."""
    num_groups, fused = model.config.num_key_value_heads, {}
    for name, tensor in tensors.items():
        prefix, marked, end = name.partition(".q_proj.")
        if marked:
            each = (tensors[f"{prefix}.{part}_proj.{end}"].chunk(num_groups) for part in "qkv")
            groups = [torch.cat(parts) for parts in zip(*each, strict=True)]
            fused[f"{prefix}.qkv_proj.{end}"] = torch.cat(groups)
        elif not any(f".{part}_proj." in name for part in "kv"):
            fused[name] = tensor
    return fused


def _with_encoders(tensors: dict[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
    """Fuses q, k and v like `_fused`, and adds image and audio encoders, as in MiMo V2.5."""
    names = ("visual.merger.ln_q", "audio_encoder.projection.mlp.0", "speech_embeddings.0")
    return _fused(tensors, model) | {f"{name}.weight": torch.ones(8) for name in names}


def _mimo_v2_5(config: dict[str, Any]) -> dict[str, Any]:
    """Adds the encoders' keys to config.json."""
    parts = ("vision_config", "audio_config", "processor_config")
    return {**config, **{part: {"hidden_size": 8} for part in parts}, "image_token_id": 5}


_SAME = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "sliding_window",
    "query_pre_attn_scalar",
    "eos_token_id",
    "dtype",
    "moe_intermediate_size",
    "share_expert_dim",
    "moe_router_scaling_factor",
]
_LISTS = {"rope_theta": "rope_theta", "partial_rotary_factors": "partial_rotary_factor"}


def _step_3_5(config: dict[str, Any]) -> dict[str, Any]:
    """config.json in Step 3.5's format: per-layer lists, including one multi-token prediction
    layer. One list of limits has no entry for it."""
    text = config["text_config"]
    kinds = [*text["layer_types"], "full_attention"]
    tables = text["rope_parameters"]
    full = tables["full_attention"]
    mlps = enumerate(text["mlp_layer_types"])
    return {
        **{key: text[key] for key in _SAME},
        "model_type": "step3p5",
        "num_nextn_predict_layers": 1,
        "num_attention_groups": text["num_key_value_heads"],
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": text["num_sliding_attention_heads"],
            "num_attention_groups": text["num_key_value_heads"],
            "head_dim": text["head_dim"],
        },
        "layer_types": kinds,
        **{key: [tables[kind][name] for kind in kinds] for key, name in _LISTS.items()},
        "rope_scaling": {key: full[key] for key in full.keys() - _LISTS.values()},
        "yarn_only_types": ["full_attention"],
        "moe_layers_enum": ",".join(str(layer) for layer, kind in mlps if kind == "sparse"),
        "moe_num_experts": text["n_routed_experts"],
        "moe_top_k": text["num_experts_per_tok"],
        "swiglu_limits": [*text["swiglu_limits"], 0.0],
        "swiglu_limits_shared": text["swiglu_limits_shared"],
    }


def _text_alone(tensors: dict[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
    """Drops the vision tensors, and adds those of a multi-token prediction layer."""
    kept = {name: one for name, one in tensors.items() if name.startswith(("model.", "lm_head."))}
    count = model.config.text_config.num_hidden_layers
    return {**kept, f"model.layers.{count}.enorm.weight": torch.ones(64)}


_LAGUNA = Specimen(
    name="Laguna",
    covers=("shards", "functions"),
    settings={
        "rope_parameters": {
            "full_attention": {**_YARN, "partial_rotary_factor": 0.5},
            "sliding_attention": {**_WINDOW_ROPE, "partial_rotary_factor": 1.0},
        },
        "num_attention_heads_per_layer": [4, 2, 6],
        "sliding_window": _WINDOW,
        "layer_types": _ALTERNATING,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 40,
        "moe_routed_scaling_factor": 1.7,
        "moe_router_logit_softcapping": 0.8,
    },
    mutations={
        **_COMMON,
        "gate of attention": OPEN_GATE,
        "function of the gate": Patch(
            target="worker.models.architectures.laguna:_softplus", value=torch.sigmoid
        ),
        "norms of heads": NO_HEAD_NORMS,
        "yarn": {
            "rope_parameters": {
                "full_attention": {**_YARN, "partial_rotary_factor": 0.5, "factor": 4.0},
                "sliding_attention": {**_WINDOW_ROPE, "partial_rotary_factor": 1.0},
            }
        },
        "share of rotary dimensions": {
            "rope_parameters": {
                "full_attention": {**_YARN, "partial_rotary_factor": 1.0},
                "sliding_attention": {**_WINDOW_ROPE, "partial_rotary_factor": 1.0},
            }
        },
        "share of rotary dimensions in windows": {
            "rope_parameters": {
                "full_attention": {**_YARN, "partial_rotary_factor": 0.5},
                "sliding_attention": {**_WINDOW_ROPE, "partial_rotary_factor": 0.5},
            }
        },
        "dense layers": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
        "shared expert": NO_SHARED_EXPERT,
        "cap of scores": {"moe_router_logit_softcapping": 0.0},
        "scale of experts": {"moe_routed_scaling_factor": 1.0},
    },
)

_STEP = Specimen(
    name="Step3p7Text",
    multimodal="Step3p7",
    covers=("shards", "experts"),
    settings={
        "rope_parameters": {
            "full_attention": {**LLAMA3_ROPE, "partial_rotary_factor": 0.5},
            "sliding_attention": {**_WINDOW_ROPE, "partial_rotary_factor": 1.0},
        },
        "num_sliding_attention_heads": 6,
        "query_pre_attn_scalar": 9.0,
        "sliding_window": _WINDOW,
        "layer_types": _ALTERNATING,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "share_expert_dim": 32,
        "moe_router_scaling_factor": 1.7,
        "swiglu_limits": [0.4, 0.0, None],
        "swiglu_limits_shared": [None, 0.3, 0.5],
    },
    mutations={
        **_COMMON,
        "gate of attention": OPEN_GATE,
        "norms of heads": NO_HEAD_NORMS,
        "weights from 0": NO_NORM_OFFSET,
        "scale of attention": {"query_pre_attn_scalar": 16.0},
        "llama3": {
            "rope_parameters": {
                "full_attention": {**LLAMA3_ROPE, "partial_rotary_factor": 0.5, "factor": 2.0},
                "sliding_attention": {**_WINDOW_ROPE, "partial_rotary_factor": 1.0},
            }
        },
        "share of rotary dimensions": {
            "rope_parameters": {
                "full_attention": {**LLAMA3_ROPE, "partial_rotary_factor": 1.0},
                "sliding_attention": {**_WINDOW_ROPE, "partial_rotary_factor": 1.0},
            }
        },
        "limit of experts": {"swiglu_limits": [0.0, 0.0, None]},
        "limit of the shared expert": {"swiglu_limits_shared": [None, 0.3, None]},
        "limit of the MLP": {"swiglu_limits_shared": [None, 0.0, 0.5]},
        "shared expert": NO_SHARED_EXPERT,
        "scale of experts": {"moe_router_scaling_factor": 1.0},
    },
)

_MIMO = Specimen(
    name="MiMoV2Flash",
    covers=("positions", "cache", "shards"),
    settings={
        "rope_parameters": {
            "full_attention": _FULL_ROPE,
            "sliding_attention": {**_WINDOW_ROPE, **_SAME_SHARES},
        },
        "num_key_value_heads": 1,
        "v_head_dim": 8,
        "attention_bias": True,
        "attention_value_scale": 0.5,
        "sliding_window": _WINDOW,
        "layer_types": _ALTERNATING,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
    },
    mutations={
        **_COMMON,
        "sinks": NO_SINKS,
        "no bias": NO_QKV_BIAS,
        "factor of values": {"attention_value_scale": 1.0},
        "window of the released key": {"sliding_window_size": _WINDOW},
        "theta of windows": {
            "rope_parameters": {"full_attention": _FULL_ROPE, "sliding_attention": _FULL_ROPE}
        },
        "share of rotary dimensions": {
            "rope_parameters": {
                "full_attention": {**_FULL_ROPE, "partial_rotary_factor": 0.25},
                "sliding_attention": {**_WINDOW_ROPE, **_SAME_SHARES},
            }
        },
        "dense layers": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
        "groups": {"topk_group": 4},
        "sum of weights": {"norm_topk_prob": False},
        "scale of experts": {"routed_scaling_factor": 1.0},
    },
)

HEAD_KIND_SPECIMENS: dict[str, Specimen] = {
    "mimo-v2": _MIMO,
    "mimo-v2-fused": replace(
        _MIMO,
        settings={
            **_MIMO.settings,
            "num_key_value_heads": 2,
            "attention_projection_layout": "fused_qkv",
        },
        architecture="MiMoV2ForCausalLM",
        rewrite=_with_encoders,
        rewrite_config=_mimo_v2_5,
        covers=(),
        is_variant=True,
    ),
    "laguna": _LAGUNA,
    "step3p7": _STEP,
    "step3p5": replace(
        _STEP,
        rewrite=_text_alone,
        rewrite_config=_step_3_5,
        architecture="Step3p5ForCausalLM",
        mutations={
            "window of one more": {"sliding_window": _WINDOW + 1},
            "eps": {"rms_norm_eps": 0.1},
            "number of experts": {"moe_top_k": 2},
            "theta": {"rope_theta": [60.0, 100.0, 60.0, 100.0]},
            "share of rotary dimensions": {"partial_rotary_factors": [1.0, 0.25, 1.0, 0.25]},
            "limits": {"swiglu_limits": [0.0, 0.0, 0.0, 0.0]},
        },
        covers=(),
        is_variant=True,
    ),
    "laguna-wide": replace(
        _LAGUNA,
        settings={**_LAGUNA.settings, "gating": "per-element"},
        covers=(),
        is_variant=True,
    ),
}
