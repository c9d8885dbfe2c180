"""Families with mixtures of experts: a part of the table in `families.py`. Imports no torch."""

from __future__ import annotations

from worker.models.config.family import (
    ROUTER_KEYS,
    ModelFamily,
    chunks_by_type,
    linear_by_type,
    no_other_attention,
    no_windowed_types,
    one_window,
    rotating_layers,
    switched_window,
    window_of_types,
    with_alpha,
    words,
)
from worker.models.config.moe_config import (
    parse_deepseek_moe,
    parse_ernie_moe,
    parse_glm4_moe,
    parse_hunyuan_moe,
    parse_llada2_moe,
    parse_llama4_moe,
    parse_minimax_m2_moe,
    parse_mixtral_moe,
    parse_olmo_moe,
    parse_qwen3_5_moe,
    parse_qwen3_moe,
    parse_solar_open_moe,
)

GRANITE_OWN = (
    *("embedding_multiplier", "attention_multiplier", "residual_multiplier"),
    "logits_scaling",
)
GRANITE_DEFAULTS: dict[str, object] = {
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
    **dict.fromkeys(GRANITE_OWN, 1.0),
}
WINDOW_KEYS = frozenset({"use_sliding_window", "sliding_window"})
_QWEN3_MOE_KEYS = WINDOW_KEYS | {
    "attention_bias",
    "num_local_experts",  # transformers 5 writes num_experts so
    "decoder_sparse_step",
    "mlp_only_layers",
    "output_router_logits",
    "router_aux_loss_coef",
}
SDAR_KEYS = words(
    """
    attention_bias debug ep_size fuse_cross_entropy micro_forward skip_checkpoint
    use_regular_causal
    """
)
BLOCKS_OF_4 = {"block_size": 4, "mask_token_id": 151669}
DELTA_NET_OWN = (
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads"),
)
DELTA_NET_DEFAULTS: dict[str, object] = {
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
QWEN3_5_KEYS = words(
    """
    attention_bias layer_types full_attention_interval mtp_num_hidden_layers
    mtp_use_dedicated_embeddings
    """
)
QWEN3_5_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attn_output_gate": (True,),
    "mamba_ssm_dtype": ("float32",),
}
_QWEN3_MOE_DEFAULTS: dict[str, object] = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
}


MOE_FAMILIES: dict[str, ModelFamily] = {
    "DeepseekForCausalLM": ModelFamily(
        model_types=("deepseek",),
        implementation="qwen3_moe:Qwen3MoeForCausalLM",
        defaults={
            "max_position_embeddings": 2048,
            "eos_token_id": 100001,
            "moe_intermediate_size": 1407,
            "num_experts_per_tok": None,
            "n_shared_experts": None,
            "n_routed_experts": None,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
        },
        keys=words("aux_loss_alpha ep_size seq_aux attention_bias"),
        neutral={"moe_layer_freq": (1,), "scoring_func": ("softmax",)},
        parse_moe=parse_deepseek_moe,
    ),
    "Glm4MoeForCausalLM": ModelFamily(
        model_types=("glm4_moe",),
        implementation="glm4_moe:Glm4MoeForCausalLM",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "attention_bias": False,
            "use_qk_norm": False,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
        keys=words(
            """
            num_nextn_predict_layers num_mtp_layers output_router_logits router_aux_loss_coef
            """
        ),
        output_bias="",
        skips_next_layers=True,
        parse_moe=parse_glm4_moe,
    ),
    "SolarOpenForCausalLM": ModelFamily(
        model_types=("solar_open",),
        implementation="glm4_moe:Glm4MoeForCausalLM",
        defaults={
            "intermediate_size": 10240,  # of no layer: all have experts
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "attention_bias": False,
            "moe_intermediate_size": 1280,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
        },
        keys=ROUTER_KEYS,
        output_bias="",
        parse_moe=parse_solar_open_moe,
    ),
    "GraniteMoeForCausalLM": ModelFamily(
        model_types=("granitemoe",),
        implementation="granite:GraniteMoeForCausalLM",
        defaults={**GRANITE_DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2},
        own=GRANITE_OWN,
        keys=ROUTER_KEYS | {"attention_bias"},
        parse_moe=parse_mixtral_moe,
    ),
    "FlexOlmoForCausalLM": ModelFamily(
        model_types=("flex_olmo",),
        implementation="post_norm:FlexOlmoForCausalLM",
        defaults={
            "max_position_embeddings": 4096,
            "rope_theta": 500000.0,
            "eos_token_id": 100257,
            "num_experts": 7,
            "num_experts_per_tok": 5,
            "norm_topk_prob": False,
        },
        keys=ROUTER_KEYS | {"attention_bias", "num_local_experts"},
        parse_moe=parse_olmo_moe,
    ),
    "HunYuanMoEV1ForCausalLM": ModelFamily(
        model_types=("hunyuan_v1_moe", "hunyuan"),
        implementation="hunyuan_moe:HunYuanMoEV1ForCausalLM",
        defaults={
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 2,
            "num_experts": 1,
            "moe_topk": 1,
        },
        keys=ROUTER_KEYS
        | words(
            """
            attention_bias num_local_experts num_experts_per_tok moe_intermediate_size eod_token_id
            cla_share_factor
            """
        ),
        neutral={
            "norm_topk_prob": (True,),
            "num_shared_expert": (1,),
            "use_mixed_mlp_moe": (True,),
        },
        qk_norm=True,
        translate=with_alpha,
        parse_moe=parse_hunyuan_moe,
    ),
    "GptOssForCausalLM": ModelFamily(
        model_types=("gpt_oss",),
        implementation="gpt_oss:GptOssForCausalLM",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "attention_bias": True,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        own=("swiglu_alpha", "swiglu_limit"),
        keys=words(
            """
            layer_types experts_per_token initial_context_length output_router_logits
            router_aux_loss_coef
            """
        ),
        has_sinks=True,
        mxfp4_experts=True,
        windows=window_of_types,
        parse_moe=parse_mixtral_moe,
    ),
    "Ernie4_5_MoeForCausalLM": ModelFamily(
        model_types=("ernie4_5_moe",),
        implementation="ernie4_5:Ernie45MoeForCausalLM",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "rope_theta": 500000.0,
            "eos_token_id": 2,
            "moe_intermediate_size": 1536,
            "moe_k": 6,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
        },
        keys=words("output_router_logits router_aux_loss_coef num_nextn_predict_layers"),
        neutral={"moe_norm_min": (1e-12,)},
        skipped=("model.mtp_",),
        parse_moe=parse_ernie_moe,
    ),
    "Llama4ForCausalLM": ModelFamily(
        model_types=("llama4_text",),
        implementation="llama4:Llama4ForCausalLM",
        defaults={
            "vocab_size": 202048,
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "eos_token_id": 2,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "moe_layers": None,
            "interleave_moe_layer_step": 1,
            "use_qk_norm": True,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
        own=(
            *("intermediate_size_mlp", "use_qk_norm"),
            *("attn_temperature_tuning", "floor_scale", "attn_scale"),
        ),
        keys=words(
            """
            attention_bias layer_types output_router_logits router_aux_loss_coef router_jitter_noise
            """
        ),
        qk_norm_key="",
        windows=chunks_by_type,
        has_chunks=True,
        rotating=rotating_layers,
        parse_moe=parse_llama4_moe,
    ),
    "MixtralForCausalLM": ModelFamily(
        model_types=("mixtral",),
        implementation="mixtral:MixtralForCausalLM",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "eos_token_id": 2,
        },
        keys=words(
            """
            sliding_window output_router_logits router_aux_loss_coef router_jitter_noise
            """
        ),
        windows=one_window,
        parse_moe=parse_mixtral_moe,
    ),
    "Qwen2MoeForCausalLM": ModelFamily(
        model_types=("qwen2_moe",),
        implementation="qwen3_moe:Qwen2MoeForCausalLM",
        defaults={
            **_QWEN3_MOE_DEFAULTS,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "qkv_bias": True,
        },
        keys=_QWEN3_MOE_KEYS - {"attention_bias", "use_sliding_window"} | {"layer_types"},
        qkv_bias_key="qkv_bias",
        output_bias="",
        windows=no_windowed_types,
        parse_moe=parse_qwen3_moe,
    ),
    "MiniMaxM2ForCausalLM": ModelFamily(
        model_types=("minimax_m2",),
        implementation="minimax_m2:MiniMaxM2ForCausalLM",
        defaults={
            "max_position_embeddings": 196608,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 5000000.0,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "eos_token_id": 200020,
        },
        keys=words(
            """
            rotary_dim partial_rotary_factor attn_type_list use_mtp num_mtp_modules
            mtp_transformer_layers output_router_logits router_aux_loss_coef router_jitter_noise
            """
        ),
        neutral={
            "use_qk_norm": (True,),
            "qk_norm_type": ("per_layer",),
            "scoring_func": ("sigmoid",),
            "use_routing_bias": (True,),
        },
        windows=no_other_attention,
        parse_moe=parse_minimax_m2_moe,
    ),
    "Qwen3NextForCausalLM": ModelFamily(
        model_types=("qwen3_next",),
        implementation="qwen3_next:Qwen3NextForCausalLM",
        defaults={
            **DELTA_NET_DEFAULTS,
            "num_key_value_heads": 2,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": True,
        },
        own=DELTA_NET_OWN,
        keys=_QWEN3_MOE_KEYS - WINDOW_KEYS | {"layer_types", "full_attention_interval"},
        qk_norm=True,
        skipped=("mtp.",),
        linear_layers=linear_by_type,
        parse_moe=parse_qwen3_moe,
    ),
    "Qwen3_5MoeForCausalLM": ModelFamily(
        model_types=("qwen3_5_moe_text",),
        implementation="qwen3_next:Qwen35ForCausalLM",
        defaults={
            **DELTA_NET_DEFAULTS,
            "intermediate_size": 512,  # of no layer: all have experts
            "num_key_value_heads": 2,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        own=DELTA_NET_OWN,
        keys=QWEN3_5_KEYS | {"num_local_experts", "output_router_logits", "router_aux_loss_coef"},
        neutral={**QWEN3_5_NEUTRAL, "norm_topk_prob": (True,), "decoder_sparse_step": (1,)},
        qk_norm=True,
        skipped=("mtp.",),
        linear_layers=linear_by_type,
        parse_moe=parse_qwen3_5_moe,
    ),
    "Qwen3MoeForCausalLM": ModelFamily(
        model_types=("qwen3_moe",),
        implementation="qwen3_moe:Qwen3MoeForCausalLM",
        defaults=_QWEN3_MOE_DEFAULTS,
        keys=_QWEN3_MOE_KEYS,
        qk_norm=True,
        windows=switched_window,
        parse_moe=parse_qwen3_moe,
    ),
    "SDARMoeForCausalLM": ModelFamily(
        model_types=("sdar_moe",),
        implementation="qwen3_moe:Qwen3MoeForCausalLM",
        defaults={
            **_QWEN3_MOE_DEFAULTS,
            **BLOCKS_OF_4,
            "head_dim": 128,
            "norm_topk_prob": True,
        },
        keys=_QWEN3_MOE_KEYS | SDAR_KEYS,
        qk_norm=True,
        windows=switched_window,
        parse_moe=parse_qwen3_moe,
    ),
    "LLaDA2MoeModelLM": ModelFamily(
        model_types=("llada2_moe",),
        implementation="llada2:LLaDA2MoeModelLM",
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "block_size": 32,
            "mask_token_id": 156895,
            "partial_rotary_factor": 0.5,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "moe_router_enable_expert_bias": True,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "num_shared_experts": 1,
        },
        keys=frozenset({"sliding_window"})  # of no effect while use_sliding_window is false
        | {"num_local_experts", "rotary_dim", "moe_shared_expert_intermediate_size"}
        | {"embedding_dropout", "output_dropout", "output_router_logits"}
        | {"router_aux_loss_coef", "mtp_loss_scaling_factor"},
        neutral={
            "score_function": ("sigmoid",),
            "router_dtype": ("fp32",),
            "use_rmsnorm": (True,),
            "moe_router_enable_shared_expert": (True,),
        },
        qk_norm=True,
        parse_moe=parse_llada2_moe,
    ),
}
"""Families by value of `architectures` in config.json."""
