"""Checkpoints of less common dense families, and mutations that break each of their features."""

from __future__ import annotations

import torch

from kernels import xielu
from tests.support.checkpoints.mutations import (
    IN_HALVES,
    NO_HEAD_NORMS,
    NO_NORM_BIAS,
    NO_QKV_BIAS,
    NO_SINKS,
    RMS_FOR_LAYER_NORM,
)
from tests.support.checkpoints.specimen import LLAMA3_ROPE, Mutation, Patch, Specimen
from worker.models.architectures.decoder import DecoderModel
from worker.models.layers.attention import AttentionTraits
from worker.models.layers.norms import LayerNorm

_WINDOW = 37
_ROPE = {"rope_type": "default", "rope_theta": 100.0}
_HALF_ROPE = {**_ROPE, "partial_rotary_factor": 0.5}
_ALPHA = {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 8.0, "factor": 1.0}
_EPS = {"eps": {"rms_norm_eps": 0.1}}
_THETA = {"theta": {"rope_parameters": {**_ROPE, "rope_theta": 300.0}}}
_HALF_MUTATIONS: dict[str, Mutation] = {
    "theta": {"rope_parameters": {**_HALF_ROPE, "rope_theta": 300.0}},
    "partial": {
        "rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0},
        "partial_rotary_factor": 1.0,
    },
}


def _with_limit_0(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    return xielu(x, torch.cat((numbers[:3], torch.zeros(1))))


_LAYER_NORMS: dict[str, Mutation] = {
    "bias of norms": NO_NORM_BIAS,
    "mean": RMS_FOR_LAYER_NORM,
}

DENSE_SPECIMENS: dict[str, Specimen] = {
    "arcee": Specimen(
        name="Arcee",
        settings={"rope_parameters": _ROPE, "attention_bias": True, "mlp_bias": True},
        mutations={
            "activation": Patch(
                target="worker.models.architectures.arcee:squared_relu", value=torch.relu
            ),
            "bias": {"mlp_bias": False},
            **_THETA,
            **_EPS,
        },
    ),
    "apertus": Specimen(
        name="Apertus",
        covers=("functions",),
        settings={"rope_parameters": LLAMA3_ROPE, "attention_bias": True},
        mutations={
            "norms of heads": NO_HEAD_NORMS,
            "order of numbers": Patch(
                target="worker.models.architectures.apertus:XieluMLP._NAMES",
                value=("alpha_n", "alpha_p", "beta", "eps"),
            ),
            "limit": Patch(target="worker.models.architectures.apertus:xielu", value=_with_limit_0),
            "norms": Patch(
                target="worker.models.architectures.apertus:ApertusLayer.norm_names",
                value=("feedforward_layernorm", "attention_layernorm"),
            ),
            "stretching": {"rope_parameters": {**LLAMA3_ROPE, "factor": 2.0}},
            **_EPS,
        },
        lacks_head_dim=True,
    ),
    "granite-swa": Specimen(
        name="GraniteSWA",
        settings={
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.5,
            "residual_multiplier": 0.6,
            "logits_scaling": 0.25,
            "rope_parameters": _ROPE,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 21,
            "layer_rope_theta": [100.0, 0.0, 30.0],
        },
        mutations={
            "sinks": NO_SINKS,
            "embedding": {"embedding_multiplier": 1.0},
            "scale of attention": {"attention_multiplier": 0.25},
            "residual": {"residual_multiplier": 1.0},
            "logits": {"logits_scaling": 4.0},
            "all rotate": {"layer_rope_theta": [100.0, 100.0, 30.0]},
            "base of a layer": {"layer_rope_theta": [100.0, 0.0, 100.0]},
            "window of one more": {"sliding_window": 22},
        },
        lacks_head_dim=True,
        is_variant=True,
    ),
    "helium": Specimen(
        name="Helium",
        is_variant=True,
        settings={"rope_parameters": _ROPE, "attention_bias": True, "mlp_bias": True},
        mutations={"order of dimensions": IN_HALVES, "no bias": NO_QKV_BIAS, **_THETA, **_EPS},
    ),
    "hunyuan": Specimen(
        name="HunYuanDenseV1",
        settings={"rope_parameters": _ALPHA, "attention_bias": True},
        mutations={
            "alpha": {"rope_parameters": {**_ALPHA, "alpha": 2.0}},
            "norms of heads": NO_HEAD_NORMS,
            "norms before rotation": Patch(
                target="worker.models.architectures.hunyuan:AttentionTraits",
                value=lambda names, rotates_first: AttentionTraits(names=names),
            ),
            **_EPS,
        },
    ),
    "stablelm": Specimen(
        name="StableLm",
        settings={"rope_parameters": _HALF_ROPE, "layer_norm_eps": 1e-3, "use_qkv_bias": True},
        mutations={
            "no bias": {"use_qkv_bias": False},
            "eps": {"layer_norm_eps": 0.1},
            **_LAYER_NORMS,
            **_HALF_MUTATIONS,
        },
        lacks_head_dim=True,
    ),
    "starcoder2": Specimen(
        name="Starcoder2",
        covers=("functions",),
        settings={
            "rope_parameters": _ROPE,
            "norm_epsilon": 1e-3,
            "sliding_window": _WINDOW,
            "tie_word_embeddings": True,
        },
        mutations={
            "no bias": {"use_bias": False},
            "eps": {"norm_epsilon": 0.1},
            "activation": Patch(target="kernels.rowwise:gelu_tanh", value=torch.relu),
            "window of one more": {"sliding_window": _WINDOW + 1},
            **_LAYER_NORMS,
            **_THETA,
        },
        lacks_head_dim=True,
    ),
    "nemotron": Specimen(
        name="Nemotron",
        settings={
            "rope_parameters": _HALF_ROPE,
            "norm_eps": 1e-3,
            "attention_bias": True,
            "mlp_bias": True,
        },
        mutations={
            "weights from 0": Patch(
                target="worker.models.architectures.nemotron:LayerNorm",
                value=lambda *args, offset, **options: LayerNorm(*args, **options),
            ),
            "eps": {"norm_eps": 0.1},
            "activation": Patch(
                target="worker.models.architectures.nemotron:squared_relu", value=torch.relu
            ),
            **_LAYER_NORMS,
            **_HALF_MUTATIONS,
        },
    ),
    "phi": Specimen(
        name="Phi",
        covers=("functions",),
        settings={"rope_parameters": _HALF_ROPE, "layer_norm_eps": 1e-3},
        mutations={
            "eps": {"layer_norm_eps": 0.1},
            "bias of scores": Patch(
                target="worker.models.architectures.phi:PhiForCausalLM.compute_logits",
                value=lambda self, hidden: _without_bias_of_scores(self, hidden),
            ),
            "activation": Patch(target="kernels.rowwise:gelu_tanh", value=torch.relu),
            **_LAYER_NORMS,
            **_HALF_MUTATIONS,
        },
        lacks_head_dim=True,
    ),
    "falcon": Specimen(
        name="Falcon",
        covers=("functions",),
        settings={
            "rope_parameters": _ROPE,
            "layer_norm_epsilon": 1e-3,
            "num_key_value_heads": 1,
            "bias": True,
            "ffn_hidden_size": 80,
            "tie_word_embeddings": True,
        },
        mutations={
            "eps": {"layer_norm_epsilon": 0.1},
            "no bias": {"bias": False},
            "activation": Patch(target="kernels.rowwise:gelu", value=torch.relu),
            **_LAYER_NORMS,
            **_THETA,
        },
        lacks_head_dim=True,
    ),
}


def _without_bias_of_scores(model: DecoderModel, hidden: torch.Tensor) -> torch.Tensor:
    own, model.lm_head._bias = model.lm_head._bias, None
    try:
        return DecoderModel.compute_logits(model, hidden)
    finally:
        model.lm_head._bias = own
