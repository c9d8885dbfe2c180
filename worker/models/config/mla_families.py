"""Families with multi-head latent attention: a part of the table in `families.py`. Imports no
torch."""

from __future__ import annotations

from worker.models.config.checkpoint import positive_integer
from worker.models.config.family import ROUTER_KEYS, ModelFamily, RawConfig, words
from worker.models.config.moe_config import (
    parse_deepseek_v2_moe,
    parse_glm4_moe,
    parse_glm4_moe_lite,
    parse_longcat_moe,
    parse_mistral4_moe,
)

_SIZES = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_DEEPSEEK_KEYS = words(
    """
    aux_loss_alpha ep_size num_mtp_layers num_nextn_predict_layers output_router_logits qk_head_dim
    router_aux_loss_coef seq_aux
    """
)
_DEEPSEEK_V3_NEUTRAL: dict[str, tuple[object, ...]] = {
    "moe_layer_freq": (1,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
}
_DEEPSEEK_V2_DEFAULTS: dict[str, object] = {
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 1407,
    "num_experts_per_tok": None,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "routed_scaling_factor": 1.0,
    "n_group": None,
    "topk_group": None,
    "topk_method": "greedy",
    "first_k_dense_replace": 0,
}
_DEEPSEEK_V3_DEFAULTS: dict[str, object] = {
    **{key: value for key, value in _DEEPSEEK_V2_DEFAULTS.items() if key != "topk_method"},
    "max_position_embeddings": 4096,
    "num_key_value_heads": 128,
    "eos_token_id": 1,
    "rope_interleave": True,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
}


def with_half_layers(raw: RawConfig) -> RawConfig:
    """Translates LongCat-Flash's keys: each of its layers is two here."""
    count = raw.get("num_hidden_layers") or 2 * positive_integer(raw, "num_layers")
    size = positive_integer(raw, "ffn_hidden_size")
    if count % 2:
        raise ValueError(f"num_hidden_layers {count} in config.json must be even: repair it")
    return {**raw, "num_hidden_layers": count, "intermediate_size": size}


MLA_FAMILIES: dict[str, ModelFamily] = {
    "DeepseekV2ForCausalLM": ModelFamily(
        model_types=("deepseek_v2",),
        implementation="deepseek:DeepseekForCausalLM",
        defaults=_DEEPSEEK_V2_DEFAULTS,
        keys=_DEEPSEEK_KEYS,
        neutral={
            "moe_layer_freq": (1,),
            "scoring_func": ("softmax",),
            "norm_topk_prob": (False,),
        },
        has_latents=True,
        parse_moe=parse_deepseek_v2_moe,
    ),
    "DeepseekV3ForCausalLM": ModelFamily(
        model_types=("deepseek_v3", "kimi_k2"),
        implementation="deepseek:DeepseekForCausalLM",
        defaults=_DEEPSEEK_V3_DEFAULTS,
        keys=_DEEPSEEK_KEYS,
        neutral=_DEEPSEEK_V3_NEUTRAL,
        has_latents=True,
        skips_next_layers=True,
        parse_moe=parse_glm4_moe,
    ),
    "Glm4MoeLiteForCausalLM": ModelFamily(
        model_types=("glm4_moe_lite",),
        implementation="deepseek:DeepseekForCausalLM",
        defaults={
            **_DEEPSEEK_V3_DEFAULTS,
            "max_position_embeddings": 202752,
            "num_key_value_heads": 20,
            "rms_norm_eps": 1e-5,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "moe_intermediate_size": 1536,
            "num_experts_per_tok": 4,
            "n_routed_experts": 64,
            "routed_scaling_factor": 1.8,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": None,
        },
        keys=_DEEPSEEK_KEYS | {"mlp_layer_types"},
        neutral=_DEEPSEEK_V3_NEUTRAL,
        has_latents=True,
        skips_next_layers=True,
        parse_moe=parse_glm4_moe_lite,
    ),
    "Mistral4ForCausalLM": ModelFamily(
        model_types=("mistral4",),
        implementation="deepseek:DeepseekForCausalLM",
        defaults={
            **_DEEPSEEK_V3_DEFAULTS,
            "max_position_embeddings": 1048576,
            "num_key_value_heads": 32,
            "eos_token_id": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 128.0,
                "original_max_position_embeddings": 8192,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
            "kv_lora_rank": 256,
            "q_lora_rank": 1024,
            "qk_nope_head_dim": 64,
            "num_experts_per_tok": 4,
            "n_routed_experts": 128,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
        },
        keys=ROUTER_KEYS | {"qk_head_dim", "partial_rotary_factor"},
        has_latents=True,
        query_beta=True,
        parse_moe=parse_mistral4_moe,
    ),
    "LongcatFlashForCausalLM": ModelFamily(
        model_types=("longcat_flash",),
        implementation="longcat:LongcatFlashForCausalLM",
        defaults={
            **{key: _DEEPSEEK_V3_DEFAULTS[key] for key in _SIZES},
            "vocab_size": 131072,
            "hidden_size": 6144,
            "num_attention_heads": 64,
            "num_layers": 28,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000000.0,
            "eos_token_id": 2,
            "ffn_hidden_size": 12288,
            "moe_topk": 12,
            "n_routed_experts": 512,
            "zero_expert_num": 256,
            "expert_ffn_hidden_size": 2048,
            "routed_scaling_factor": 6.0,
        },
        keys=ROUTER_KEYS | {"qk_head_dim"},
        neutral={
            "attention_method": ("MLA",),
            "mla_scale_kv_lora": (True,),
            "mla_scale_q_lora": (True,),
            "zero_expert_type": ("identity",),
        },
        has_latents=True,
        skipped=("model.mtp.",),
        parse_moe=parse_longcat_moe,
        translate=with_half_layers,
    ),
}
"""Families by value of `architectures` in config.json."""
