"""Checkpoints of the dense families that few of today's models are of, and what would be wrong if
one of their features were missed."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from tests.support.checkpoints.mutations import (
    IN_HALVES,
    NO_HEAD_NORMS,
    NO_NORM_BIAS,
    NO_QKV_BIAS,
)
from tests.support.checkpoints.specimen import Mutation, Patch, Specimen
from worker.models.apertus import XieluMLP
from worker.models.decoder import DecoderModel
from worker.models.layers import AttentionNames, AttentionTraits, GatedMLP
from worker.models.norms import LayerNorm

Tensors = dict[str, torch.Tensor]

_WINDOW = 37
_ROPE = {"rope_type": "default", "rope_theta": 100.0}
_HALF_ROPE = {**_ROPE, "partial_rotary_factor": 0.5}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
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
_SCALES = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.25,
    "residual_multiplier": 1.4 * 3**-0.5,
    "logits_scaling": 0.25,
}


def _with_further_layers(tensors: Tensors, model: PreTrainedModel) -> Tensors:
    return {**tensors, "model.mtp_layers.0.final_layernorm.weight": torch.ones(64)}


def _renamed(tensors: Tensors, names: dict[str, str]) -> Tensors:
    """Parts of names replaced by others."""
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)
        renamed[name] = tensor
    return renamed


def _fused(tensors: Tensors, name: str, *, grouped: int = 0) -> Tensors:
    """q, k and v of each layer as one tensor; of each kv head together where there are so many."""
    kept = {key: tensor for key, tensor in tensors.items() if ".q_proj." not in key}
    for key, q in tensors.items():
        if ".q_proj." not in key:
            continue
        k, v = (kept.pop(key.replace("q_proj", other)) for other in ("k_proj", "v_proj"))
        heads = [x.unflatten(0, (grouped or 1, -1)) for x in (q, k, v)]
        kept[key.replace("q_proj", name)] = torch.cat(heads, dim=1).flatten(0, 1)
    return kept


def _as_internlm2(tensors: Tensors, model: PreTrainedModel) -> Tensors:
    names = {
        "embed_tokens": "tok_embeddings",
        "self_attn.o_proj": "self_attn.wo",
        "self_attn": "attention",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "lm_head": "output",
    }
    return _renamed(_fused(tensors, "wqkv", grouped=2), names)


def _as_qwen(tensors: Tensors, model: PreTrainedModel) -> Tensors:
    names = {
        "model.embed_tokens": "transformer.wte",
        "model.layers": "transformer.h",
        "model.norm": "transformer.ln_f",
        "self_attn.o_proj": "attn.c_proj",
        "self_attn": "attn",
        "gate_proj": "w2",
        "up_proj": "w1",
        "down_proj": "c_proj",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
    }
    return _renamed(_fused(tensors, "c_attn"), names)


def _as_baichuan(tensors: Tensors, model: PreTrainedModel) -> Tensors:
    """transformers' model gets the rows that are divided by their lengths."""
    head: Any = model.get_output_embeddings()
    head.weight.div_(head.weight.norm(dim=1, keepdim=True))
    return _fused(tensors, "W_pack")


def _with_limit_0(self: XieluMLP, x: torch.Tensor) -> torch.Tensor:
    own, self._eps = self._eps, torch.zeros(())
    try:
        return _XIELU(self, x)
    finally:
        self._eps = own


_XIELU = XieluMLP._xielu
_LAYER_NORMS: dict[str, Mutation] = {
    "bias of norms": NO_NORM_BIAS,
    "mean": Patch(
        target="worker.models.norms:LayerNorm.forward",
        value=lambda self, x: (
            torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, self._eps) + self.bias
        ),
    ),
}

DENSE_SPECIMENS: dict[str, Specimen] = {
    "arcee": Specimen(
        name="Arcee",
        settings={"rope_parameters": _ROPE, "attention_bias": True, "mlp_bias": True},
        mutations={
            "activation": Patch(target="worker.models.arcee:squared_relu", value=torch.relu),
            "bias": {"mlp_bias": False},
            **_THETA,
            **_EPS,
        },
    ),
    "apertus": Specimen(
        name="Apertus",
        settings={"rope_parameters": _LLAMA3, "attention_bias": True},
        mutations={
            "norms of heads": NO_HEAD_NORMS,
            "order of numbers": Patch(
                target="worker.models.apertus:XieluMLP._NAMES",
                value=("alpha_n", "alpha_p", "beta", "eps"),
            ),
            "limit": Patch(target="worker.models.apertus:XieluMLP._xielu", value=_with_limit_0),
            "norms": Patch(
                target="worker.models.apertus:ApertusLayer.norm_names",
                value=("feedforward_layernorm", "attention_layernorm"),
            ),
            "stretching": {"rope_parameters": {**_LLAMA3, "factor": 2.0}},
            **_EPS,
        },
        lacks_head_dim=True,
    ),
    "helium": Specimen(
        name="Helium",
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
                target="worker.models.hunyuan:AttentionTraits",
                value=lambda names, rotates_first: AttentionTraits(names=names),
            ),
            **_EPS,
        },
    ),
    "iquestcoder": Specimen(
        name="Llama",
        settings={"rope_parameters": _ROPE},
        mutations={**_THETA, **_EPS},
        said={"architectures": ["IQuestCoderForCausalLM"], "model_type": "iquestcoder"},
    ),
    "internlm": Specimen(
        name="Llama",
        settings={"rope_parameters": _ROPE, "attention_bias": True, "num_key_value_heads": 4},
        mutations={"no bias": {"bias": False}, **_THETA},
        said={
            "architectures": ["InternLMForCausalLM"],
            "model_type": "internlm",
            "bias": True,
            "attention_bias": None,
        },
    ),
    "internlm2": Specimen(
        name="Llama",
        settings={"rope_parameters": _ROPE, "attention_bias": True},
        mutations={
            "no bias": {"bias": False},
            "order of rows": Patch(
                target="worker.models.renamed:AttentionNames",
                value=lambda is_grouped, **names: AttentionNames(is_fused=True, **names),
            ),
            "order of norms": Patch(
                target="worker.models.renamed:InternLM2Layer.norm_names",
                value=("ffn_norm", "attention_norm"),
            ),
            **_THETA,
            **_EPS,
        },
        said={
            "architectures": ["InternLM2ForCausalLM"],
            "model_type": "internlm2",
            "bias": True,
            "attention_bias": None,
        },
        rewrite=_as_internlm2,
    ),
    "baichuan": Specimen(
        name="Llama",
        settings={"rope_parameters": _ROPE, "num_key_value_heads": 4},
        mutations={
            "lengths of rows": Patch(
                target="worker.models.renamed:BaichuanForCausalLM.pack", value=DecoderModel.pack
            ),
            **_THETA,
            **_EPS,
        },
        said={"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan"},
        rewrite=_as_baichuan,
    ),
    "qwen": Specimen(
        name="Qwen2",
        settings={"rope_parameters": _ROPE, "num_key_value_heads": 4},
        mutations={
            "no bias": NO_QKV_BIAS,
            "gate and up": Patch(
                target="worker.models.renamed:GatedMLP",
                value=lambda *args, names: GatedMLP(*args, names=("w1", "w2", "c_proj")),
            ),
            "theta": {"rotary_emb_base": 300},
            "eps": {"layer_norm_epsilon": 0.1},
        },
        said={
            "architectures": ["QWenLMHeadModel"],
            "model_type": "qwen",
            "intermediate_size": 96,
            "kv_channels": 16,
            "layer_norm_epsilon": 1e-3,
            "no_bias": True,
            "rotary_emb_base": 100,
            "seq_length": 256,
            **dict.fromkeys(("layer_types", "rope_parameters", "rms_norm_eps")),
        },
        rewrite=_as_qwen,
        lacks_head_dim=True,
    ),
    "mimo": Specimen(
        name="Qwen2",
        settings={"rope_parameters": _ROPE},
        mutations={"no bias": {"attention_bias": False}, **_THETA, **_EPS},
        said={
            "architectures": ["MiMoForCausalLM"],
            "model_type": "mimo",
            "attention_bias": True,
            "num_nextn_predict_layers": 1,
        },
        rewrite=_with_further_layers,
        lacks_head_dim=True,
    ),
    "minicpm": Specimen(
        name="Granite",
        settings={"rope_parameters": _ROPE, "tie_word_embeddings": True, **_SCALES},
        mutations={
            "embedding": {"scale_emb": 1.0},
            "residual": {"scale_depth": 1.0},
            "logits": {"dim_model_base": 128},
            **_THETA,
            **_EPS,
        },
        said={
            "architectures": ["MiniCPMForCausalLM"],
            "model_type": "minicpm",
            "scale_emb": 3.0,
            "scale_depth": 1.4,
            "dim_model_base": 256,
            **dict.fromkeys(_SCALES),
        },
        lacks_head_dim=True,
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
    "orion": Specimen(
        name="StableLm",
        settings={
            "rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0},
            "layer_norm_eps": 1e-3,
        },
        mutations={**_LAYER_NORMS, **_THETA, **_EPS},
        said={
            "architectures": ["OrionForCausalLM"],
            "model_type": "orion",
            "layer_norm_eps": None,
        },
        lacks_head_dim=True,
    ),
    "starcoder2": Specimen(
        name="Starcoder2",
        settings={
            "rope_parameters": _ROPE,
            "norm_epsilon": 1e-3,
            "sliding_window": _WINDOW,
            "tie_word_embeddings": True,
        },
        mutations={
            "no bias": {"use_bias": False},
            "eps": {"norm_epsilon": 0.1},
            "activation": Patch(target="worker.models.layer_norm:gelu_tanh", value=torch.relu),
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
                target="worker.models.layer_norm:LayerNorm",
                value=lambda *args, offset, **options: LayerNorm(*args, **options),
            ),
            "eps": {"norm_eps": 0.1},
            "activation": Patch(target="worker.models.layer_norm:squared_relu", value=torch.relu),
            **_LAYER_NORMS,
            **_HALF_MUTATIONS,
        },
    ),
    "phi": Specimen(
        name="Phi",
        settings={"rope_parameters": _HALF_ROPE, "layer_norm_eps": 1e-3},
        mutations={
            "eps": {"layer_norm_eps": 0.1},
            "bias of scores": Patch(
                target="worker.models.phi:PhiForCausalLM.compute_logits",
                value=lambda self, hidden: _without_bias_of_scores(self, hidden),
            ),
            "activation": Patch(target="worker.models.phi:gelu_tanh", value=torch.relu),
            **_LAYER_NORMS,
            **_HALF_MUTATIONS,
        },
        lacks_head_dim=True,
    ),
    "falcon": Specimen(
        name="Falcon",
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
            "activation": Patch(target="torch.nn.functional:gelu", value=torch.relu),
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
