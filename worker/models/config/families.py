"""Model families: the class that implements each, and the keys of config.json that it knows.

A key that a family does not know may change the mathematics, so a checkpoint with one is refused,
and the message names the key. To add a family, add an entry to `FAMILIES` and, if its layers are
not those of another family, a module like `llama.py`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worker.models.config.dense_families import DENSE_FAMILIES
from worker.models.config.family import (
    ModelFamily,
    linear_by_type,
    no_windowed_types,
    one_window,
    rotating_layers,
    wider_full_heads,
    window_but_every_sixth,
    window_of_types,
    windows_by_layer,
    words,
)
from worker.models.config.mla_families import MLA_FAMILIES
from worker.models.config.moe_config import parse_gemma4_moe
from worker.models.config.moe_families import (
    BLOCKS_OF_4,
    DELTA_NET_DEFAULTS,
    DELTA_NET_OWN,
    GRANITE_DEFAULTS,
    GRANITE_OWN,
    MOE_FAMILIES,
    QWEN3_5_KEYS,
    QWEN3_5_NEUTRAL,
    SDAR_KEYS,
    WINDOW_KEYS,
)

_QWEN_KEYS = WINDOW_KEYS | {"layer_types"}
_QWEN_DEFAULTS: dict[str, object] = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GLM_DEFAULTS: dict[str, object] = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 0.00000015625,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
}
_PHI3_DEFAULTS: dict[str, object] = {
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 1.0,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 32000,
}
_COHERE_DEFAULTS: dict[str, object] = {
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
    "rope_theta": 500000.0,
    "eos_token_id": 255001,
}

FAMILIES: dict[str, ModelFamily] = {
    "LlamaForCausalLM": ModelFamily(
        model_types=("llama",),
        implementation="llama:LlamaForCausalLM",
        defaults={"max_position_embeddings": 2048, "eos_token_id": 2},
        keys=frozenset({"attention_bias", "mlp_bias", "sliding_window"}),
    ),
    "GraniteForCausalLM": ModelFamily(
        model_types=("granite",),
        implementation="granite:GraniteForCausalLM",
        defaults=GRANITE_DEFAULTS,
        own=GRANITE_OWN,
        keys=frozenset({"attention_bias", "mlp_bias"}),
    ),
    "Ministral3ForCausalLM": ModelFamily(
        model_types=("ministral3",),
        implementation="ministral3:Ministral3ForCausalLM",
        defaults={
            "max_position_embeddings": 262144,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        keys=frozenset({"sliding_window"}),
        query_beta=True,
        windows=one_window,
    ),
    "Qwen3_5ForCausalLM": ModelFamily(
        model_types=("qwen3_5_text",),
        implementation="qwen3_next:Qwen35ForCausalLM",
        defaults={**DELTA_NET_DEFAULTS, "num_key_value_heads": 4},
        own=DELTA_NET_OWN,
        keys=QWEN3_5_KEYS,
        neutral=QWEN3_5_NEUTRAL,
        qk_norm=True,
        skipped=("mtp.",),
        linear_layers=linear_by_type,
    ),
    "InternLM3ForCausalLM": ModelFamily(
        model_types=("internlm3",),
        implementation="llama:LlamaForCausalLM",
        defaults={
            "max_position_embeddings": 32768,
            "eos_token_id": 2,
            "qkv_bias": False,
            "bias": False,
        },
        qkv_bias_key="qkv_bias",
        output_bias="bias",
        mlp_bias_key="bias",
    ),
    "MinistralForCausalLM": ModelFamily(
        model_types=("ministral",),
        implementation="llama:LlamaForCausalLM",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "eos_token_id": 2,
        },
        keys=frozenset({"layer_types"}),
        windows=window_of_types,
    ),
    "GlmForCausalLM": ModelFamily(
        model_types=("glm",),
        implementation="glm4:GlmForCausalLM",
        defaults=_GLM_DEFAULTS,
        output_bias="",
    ),
    "Glm4ForCausalLM": ModelFamily(
        model_types=("glm4",),
        implementation="glm4:Glm4ForCausalLM",
        defaults=_GLM_DEFAULTS,
        output_bias="",
    ),
    "SmolLM3ForCausalLM": ModelFamily(
        model_types=("smollm3",),
        implementation="smollm3:SmolLM3ForCausalLM",
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "eos_token_id": 128001,
            "tie_word_embeddings": True,
            "rope_theta": 2000000.0,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        },
        keys=frozenset({"attention_bias", "mlp_bias", "layer_types", "sliding_window"}),
        rotating=rotating_layers,
        windows=no_windowed_types,
    ),
    "SeedOssForCausalLM": ModelFamily(
        model_types=("seed_oss",),
        implementation="llama:LlamaForCausalLM",
        defaults={
            "max_position_embeddings": 524288,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
            "eos_token_id": 2,
        },
        keys=frozenset({"attention_out_bias", "mlp_bias", "residual_dropout"}),
        output_bias="attention_out_bias",
    ),
    "Olmo2ForCausalLM": ModelFamily(
        model_types=("olmo2",),
        implementation="post_norm:Olmo2ForCausalLM",
        defaults={
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 50279,
        },
        keys=frozenset({"attention_bias"}),
    ),
    "Olmo3ForCausalLM": ModelFamily(
        model_types=("olmo3",),
        implementation="post_norm:Olmo2ForCausalLM",
        defaults={
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "eos_token_id": 50279,
        },
        keys=frozenset({"attention_bias", "layer_types"}),
        window_theta="rope_theta",
        windows=window_of_types,
    ),
    "GemmaForCausalLM": ModelFamily(
        model_types=("gemma",),
        implementation="gemma:GemmaForCausalLM",
        defaults={
            "max_position_embeddings": 8192,
            "head_dim": 256,
            "num_key_value_heads": 16,
            "tie_word_embeddings": True,
            "eos_token_id": 1,
        },
        keys=frozenset({"attention_bias"}),
        neutral={
            "hidden_act": ("gelu", "gelu_pytorch_tanh"),  # both mean the latter
            "hidden_activation": ("gelu_pytorch_tanh",),
        },
    ),
    "Gemma2ForCausalLM": ModelFamily(
        model_types=("gemma2",),
        implementation="gemma:Gemma2ForCausalLM",
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
            "tie_word_embeddings": True,
            "eos_token_id": 1,
        },
        own=("query_pre_attn_scalar", "final_logit_softcapping"),
        keys=words("attention_bias layer_types sliding_window_size"),
        neutral={
            "hidden_act": ("gelu_pytorch_tanh",),
            "hidden_activation": ("gelu_pytorch_tanh",),
        },
        windows=window_of_types,
    ),
    "Gemma3ForCausalLM": ModelFamily(
        model_types=("gemma3_text",),
        implementation="gemma:Gemma2ForCausalLM",
        defaults={
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "tie_word_embeddings": True,
            "eos_token_id": 1,
        },
        own=("query_pre_attn_scalar", "final_logit_softcapping"),
        keys=words("attention_bias layer_types _sliding_window_pattern"),
        neutral={"hidden_activation": ("gelu_pytorch_tanh",)},
        qk_norm=True,
        window_theta="rope_local_base_freq",
        windows=window_of_types,
    ),
    "Gemma4ForCausalLM": ModelFamily(
        model_types=("gemma4_text",),
        implementation="gemma4:Gemma4ForCausalLM",
        defaults={
            "vocab_size": 262144,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "global_head_dim": 512,
            "num_global_key_value_heads": None,
            "attention_k_eq_v": False,
            "max_position_embeddings": 131072,
            "rope_theta": 10000.0,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 1000000.0,
                    "partial_rotary_factor": 0.25,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "final_logit_softcapping": None,
            "sliding_window": 512,
            "enable_moe_block": False,
            "num_experts": None,
            "top_k_experts": None,
            "moe_intermediate_size": None,
            "tie_word_embeddings": True,
            "eos_token_id": 1,
        },
        needed=("hidden_size_per_layer_input",),
        own=("attention_k_eq_v", "final_logit_softcapping"),
        keys=words(
            """
            attention_bias layer_types per_layer_config use_double_wide_mlp
            vocab_size_per_layer_input
            """
        ),  # use_double_wide_mlp concerns layers that share keys and values: there are none
        neutral={
            "hidden_activation": ("gelu_pytorch_tanh",),
            "hidden_size_per_layer_input": (0,),
            "num_kv_shared_layers": (0,),
            "use_bidirectional_attention": ("vision",),
        },
        qk_norm=True,
        window_theta="rope_theta",
        windows=window_but_every_sixth,
        full_heads=wider_full_heads,
        parse_moe=parse_gemma4_moe,
    ),
    "Ernie4_5ForCausalLM": ModelFamily(
        model_types=("ernie4_5",),
        implementation="ernie4_5:Ernie45ForCausalLM",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "rope_theta": 500000.0,
            "eos_token_id": 2,
        },
    ),
    "Exaone4ForCausalLM": ModelFamily(
        model_types=("exaone4",),
        implementation="post_norm:Exaone4ForCausalLM",
        defaults={
            "max_position_embeddings": 2048,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "eos_token_id": 2,
        },
        own=("sliding_window",),
        keys=frozenset({"layer_types"}),
        qk_norm=True,
        windows=window_of_types,
    ),
    "CohereForCausalLM": ModelFamily(
        model_types=("cohere",),
        implementation="cohere:CohereForCausalLM",
        defaults=_COHERE_DEFAULTS,
        own=("logit_scale",),
        keys=frozenset({"attention_bias", "model_max_length"}),
    ),
    "Cohere2ForCausalLM": ModelFamily(
        model_types=("cohere2",),
        implementation="cohere:Cohere2ForCausalLM",
        defaults={
            **{**_COHERE_DEFAULTS, "rope_theta": 10000.0},
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        own=("logit_scale",),
        keys=frozenset({"attention_bias", "layer_types"}),
        neutral={
            "layer_switch": (4,),
            "order_of_interleaved_layers": ("local_attn_first",),
            "position_embedding_type": ("rope_gptj",),
            "rotary_pct": (1.0,),
            "use_embedding_sharing": (True,),
            "use_gated_activation": (True,),
            "use_parallel_block": (True,),
            "use_parallel_embedding": (True, False),
        },
        windows=window_of_types,
    ),
    "MistralForCausalLM": ModelFamily(
        model_types=("mistral",),
        implementation="llama:LlamaForCausalLM",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "eos_token_id": 2,
        },
        windows=one_window,
    ),
    "Phi3ForCausalLM": ModelFamily(
        model_types=("phi3",),
        implementation="phi3:Phi3ForCausalLM",
        defaults=_PHI3_DEFAULTS,
        keys=frozenset({"sliding_window"}),
        neutral={"full_attn_mod": (1,), "interpolate_factor": (1,)},
        windows=one_window,
    ),
    "Phi3VForCausalLM": ModelFamily(
        model_types=("phi3_v",),
        implementation="phi3:Phi3ForCausalLM",
        defaults=_PHI3_DEFAULTS,
        keys=words("sliding_window embd_layer img_processor"),
        skipped=("model.vision_embed_tokens.",),
        windows=one_window,
    ),
    "Qwen2ForCausalLM": ModelFamily(
        model_types=("qwen2",),
        implementation="llama:LlamaForCausalLM",
        defaults=_QWEN_DEFAULTS,
        keys=_QWEN_KEYS | {"dual_chunk_attention_config"},
        qkv_bias=True,
        windows=windows_by_layer,
    ),
    "Qwen3ForCausalLM": ModelFamily(
        model_types=("qwen3",),
        implementation="llama:LlamaForCausalLM",
        defaults={**_QWEN_DEFAULTS, "head_dim": 128},
        keys=_QWEN_KEYS | {"attention_bias"},
        qk_norm=True,
        windows=windows_by_layer,
    ),
    "SDARForCausalLM": ModelFamily(
        model_types=("sdar",),
        implementation="llama:LlamaForCausalLM",
        defaults={**_QWEN_DEFAULTS, **BLOCKS_OF_4, "num_key_value_heads": 8, "head_dim": 128},
        keys=_QWEN_KEYS | SDAR_KEYS,
        qk_norm=True,
        windows=windows_by_layer,
    ),
    **DENSE_FAMILIES,
    **MOE_FAMILIES,
    **MLA_FAMILIES,
}
"""Families by value of `architectures` in config.json."""


def find_family(raw: Mapping[str, Any]) -> tuple[str, ModelFamily]:
    """The architecture that config.json names, and its family.

    Raises:
        ValueError: no architecture that config.json names is supported.
    """
    names = raw.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            return str(name), FAMILIES[name]
    raise ValueError(
        f"architectures {names} in config.json: none is supported "
        f"(supported: {', '.join(FAMILIES)}): use another checkpoint"
    )
