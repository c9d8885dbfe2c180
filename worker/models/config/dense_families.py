"""Dense families that few of today's models belong to; `families.py` has the others.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable

from worker.models.config.checkpoint import positive_integer
from worker.models.config.family import (
    ModelFamily,
    RawConfig,
    one_window,
    windows_by_layer,
    with_alpha,
    words,
)
from worker.models.config.moe_config import parse_minicpm_moe
from worker.models.config.moe_families import GRANITE_OWN

_GELU_TANH = ("gelu_pytorch_tanh", "gelu_new")
"""Names of GELU with the tanh approximation."""


def renamed(**names: str) -> Callable[[RawConfig], RawConfig]:
    """A `ModelFamily.translate` that sets keys, by keyword, to values of the family's keys."""

    def translate(raw: RawConfig) -> RawConfig:
        return {**raw, **{own: raw[name] for own, name in names.items()}}

    return translate


def with_scales(raw: RawConfig) -> RawConfig:
    """Translates MiniCPM's scales to Granite's keys."""
    width, base, num_layers, num_heads = (
        positive_integer(raw, key)
        for key in ("hidden_size", "dim_model_base", "num_hidden_layers", "num_attention_heads")
    )
    return {
        **raw,
        "embedding_multiplier": raw["scale_emb"],
        "attention_multiplier": max(1, width // num_heads) ** -0.5,
        "residual_multiplier": raw["scale_depth"] * num_layers**-0.5,
        "logits_scaling": width / base,
    }


def without_alibi(raw: RawConfig) -> RawConfig:
    """Refuses Baichuan's models other than Baichuan 2 7B. 13B names the same architecture, but has
    ALiBi in place of rotary embedding; no key says so, and its hidden size tells it.

    Raises:
        ValueError: the model is 13B, or has tied embeddings.
    """
    if raw["hidden_size"] == 5120:
        raise ValueError(
            "hidden_size = 5120 in config.json is that of Baichuan 13B, which adds to scores by "
            "distance (ALiBi), which is not supported: use Baichuan2-7B"
        )
    if raw.get("tie_word_embeddings"):
        raise ValueError(
            "tie_word_embeddings in config.json must be false, since scores have a weight whose "
            "rows are brought to length 1: repair it"
        )
    return raw


def falcon_sizes(raw: RawConfig) -> RawConfig:
    """Adds sizes of Falcon that follow from other keys."""
    return {
        **raw,
        "num_key_value_heads": 1,
        "intermediate_size": raw.get("ffn_hidden_size") or 4 * int(raw["hidden_size"]),
        "layer_norm_eps": raw["layer_norm_epsilon"],
    }


def qwen_sizes(raw: RawConfig) -> RawConfig:
    """Translates Qwen's keys. Sequences are limited to `seq_length`, beyond which rotary embedding
    and queries would be scaled by the sequence's length."""
    return {
        **raw,
        "head_dim": raw["kv_channels"],
        "rope_theta": raw["rotary_emb_base"],
        "rms_norm_eps": raw["layer_norm_epsilon"],
        "intermediate_size": int(raw["intermediate_size"]) // 2,
        "max_position_embeddings": min(raw["seq_length"], raw["max_position_embeddings"]),
        "has_bias": not raw["no_bias"],
        "num_key_value_heads": raw["num_attention_heads"],
    }


DENSE_FAMILIES: dict[str, ModelFamily] = {
    "ArceeForCausalLM": ModelFamily(
        model_types=("arcee",),
        implementation="arcee:ArceeForCausalLM",
        defaults={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 128001,
        },
        keys=words("attention_bias mlp_bias"),
        neutral={"hidden_act": ("relu2",)},
    ),
    "ApertusForCausalLM": ModelFamily(
        model_types=("apertus",),
        implementation="apertus:ApertusForCausalLM",
        defaults={
            "max_position_embeddings": 65536,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 2,
            "rope_theta": 12000000.0,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 12000000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        },
        keys=frozenset({"attention_bias"}),
        neutral={"hidden_act": ("xielu",), "qk_norm": (True,)},
        qk_norm=True,
    ),
    "HeliumForCausalLM": ModelFamily(
        model_types=("helium",),
        implementation="ernie4_5:Ernie45ForCausalLM",
        defaults={
            "max_position_embeddings": 4096,
            "num_key_value_heads": 20,
            "head_dim": 128,
            "rms_norm_eps": 1e-8,
            "rope_theta": 100000.0,
            "eos_token_id": 2,
        },
        keys=words("attention_bias mlp_bias"),
        output_bias="",
    ),
    "HunYuanDenseV1ForCausalLM": ModelFamily(
        model_types=("hunyuan_v1_dense",),
        implementation="hunyuan:HunYuanDenseV1ForCausalLM",
        defaults={
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 2,
        },
        keys=words("attention_bias eod_token_id"),
        qk_norm=True,
        translate=with_alpha,
    ),
    "IQuestCoderForCausalLM": ModelFamily(
        model_types=("iquestcoder",),
        implementation="llama:LlamaForCausalLM",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 2,
        },
        keys=words("attention_bias mlp_bias sliding_window"),
    ),
    "InternLMForCausalLM": ModelFamily(
        model_types=("internlm",),
        implementation="llama:LlamaForCausalLM",
        defaults={"max_position_embeddings": 2048, "bias": True, "eos_token_id": 2},
        qkv_bias_key="bias",
        output_bias="bias",
    ),
    "InternLM2ForCausalLM": ModelFamily(
        model_types=("internlm2",),
        implementation="renamed:InternLM2ForCausalLM",
        defaults={"max_position_embeddings": 2048, "bias": True, "eos_token_id": 2},
        qkv_bias_key="bias",
        output_bias="bias",
    ),
    "BaichuanForCausalLM": ModelFamily(
        model_types=("baichuan",),
        implementation="renamed:BaichuanForCausalLM",
        defaults={"eos_token_id": 2},
        keys=words("_from_model_config model_max_length z_loss_weight"),
        translate=without_alibi,
    ),
    "QWenLMHeadModel": ModelFamily(
        model_types=("qwen",),
        implementation="renamed:QWenLMHeadModel",
        defaults={
            "kv_channels": 128,
            "layer_norm_epsilon": 1e-6,
            "max_position_embeddings": 8192,
            "no_bias": True,
            "rotary_emb_base": 10000,
            "seq_length": 8192,
        },
        keys=words(
            """
            attn_dropout_prob emb_dropout_prob bf16 fp16 fp32 use_dynamic_ntk use_logn_attn
            onnx_safe softmax_in_fp32 use_cache_kernel
            """
        ),
        neutral={"rotary_pct": (1.0,), "scale_attn_weights": (True,)},
        qkv_bias=True,
        output_bias="has_bias",
        mlp_bias_key="has_bias",
        translate=qwen_sizes,
    ),
    "MiMoForCausalLM": ModelFamily(
        model_types=("mimo",),
        implementation="llama:LlamaForCausalLM",
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "attention_bias": True,
        },
        keys=words("use_sliding_window layer_types num_nextn_predict_layers"),
        output_bias="",
        skipped=("model.mtp_layers.",),
        windows=windows_by_layer,
    ),
    "MiniCPMForCausalLM": ModelFamily(
        model_types=("minicpm",),
        implementation="granite:MiniCPMForCausalLM",
        defaults={
            "max_position_embeddings": 2048,
            "scale_emb": 1,
            "scale_depth": 1,
            "dim_model_base": 1,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
        },
        own=GRANITE_OWN,
        keys=words("attention_bias num_experts num_experts_per_tok"),
        translate=with_scales,
        parse_moe=parse_minicpm_moe,
    ),
    "OrionForCausalLM": ModelFamily(
        model_types=("orion",),
        implementation="layer_norm:StableLmForCausalLM",
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "eos_token_id": 2},
    ),
    "StableLmForCausalLM": ModelFamily(
        model_types=("stablelm",),
        implementation="layer_norm:StableLmForCausalLM",
        defaults={
            "max_position_embeddings": 4096,
            "num_key_value_heads": 32,
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
            "use_qkv_bias": False,
            "eos_token_id": 0,
        },
        qkv_bias_key="use_qkv_bias",
        output_bias="",
        mlp_bias_key="",
    ),
    "Starcoder2ForCausalLM": ModelFamily(
        model_types=("starcoder2",),
        implementation="layer_norm:Starcoder2ForCausalLM",
        defaults={
            "max_position_embeddings": 4096,
            "num_key_value_heads": 2,
            "norm_epsilon": 1e-5,
            "use_bias": True,
            "tie_word_embeddings": True,
            "eos_token_id": 50256,
        },
        keys=words(
            """
            sliding_window activation_function layer_norm_epsilon residual_dropout
            embedding_dropout attention_softmax_in_fp32 scale_attention_softmax_in_fp32
            """
        ),
        neutral={
            "hidden_act": _GELU_TANH,
            "mlp_type": ("default",),
            "norm_type": ("layer_norm",),
            "scale_attn_weights": (True,),
        },
        qkv_bias_key="use_bias",
        output_bias="use_bias",
        mlp_bias_key="use_bias",
        translate=renamed(layer_norm_eps="norm_epsilon"),
        windows=one_window,
    ),
    "NemotronForCausalLM": ModelFamily(
        model_types=("nemotron",),
        implementation="layer_norm:NemotronForCausalLM",
        defaults={
            "max_position_embeddings": 4096,
            "norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "eos_token_id": 3,
        },
        keys=words("attention_bias mlp_bias"),
        neutral={"hidden_act": ("relu2",)},
        translate=renamed(layer_norm_eps="norm_eps"),
    ),
    "PhiForCausalLM": ModelFamily(
        model_types=("phi",),
        implementation="phi:PhiForCausalLM",
        defaults={
            "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "eos_token_id": 2,
        },
        neutral={"hidden_act": _GELU_TANH},
        qkv_bias=True,
        output_bias="has_bias",
        mlp_bias_key="has_bias",
        translate=lambda raw: {**raw, "has_bias": True},
    ),
    "FalconForCausalLM": ModelFamily(
        model_types=("falcon",),
        implementation="phi:FalconForCausalLM",
        defaults={
            "max_position_embeddings": 2048,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "bias": False,
            "eos_token_id": 11,
        },
        keys=words("ffn_hidden_size num_kv_heads apply_residual_connection_post_layernorm"),
        neutral={
            "activation": ("gelu",),
            "multi_query": (True,),
            "num_ln_in_parallel_attn": (1,),
            "parallel_attn": (True,),
        },
        qkv_bias_key="bias",
        output_bias="bias",
        mlp_bias_key="bias",
        translate=falcon_sizes,
    ),
}
"""Families by value of `architectures` in config.json."""
