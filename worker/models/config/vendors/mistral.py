"""Schemas of Mistral, Ministral and Mixtral (huggingface.co/mistralai). Does not import torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from worker.models.config.family import FULL, SLIDING, WindowedFamilyConfig, table
from worker.models.config.latent_family import LatentFamilyConfig
from worker.models.config.moe_config import MoeConfig, grouped_experts
from worker.models.config.multimodal import (
    VISION_AND_PROJECTOR,
    MultimodalConfig,
    language_model_and,
)
from worker.models.config.schema import ROUTER_KEYS, Count, Index, Number, words


class MistralConfig(WindowedFamilyConfig):
    """Mistral 7B to Small 3, Nemo and Large; the first 7B has sliding windows."""

    architecture = "MistralForCausalLM"
    model_types = ("mistral",)
    implementation = "llama:LlamaForCausalLM"

    max_position_embeddings: Count = 131072
    num_key_value_heads: Count | None = 8
    sliding_window: Index | None = 4096
    eos_token_id: Any = 2


class MinistralConfig(MistralConfig):
    """Ministral 8B: sliding windows in some layers."""

    architecture = "MinistralForCausalLM"
    model_types = ("ministral",)
    layer_kinds = (FULL, SLIDING)


class Ministral3Config(WindowedFamilyConfig):
    """Ministral 3 and Devstral 2: queries are scaled by position."""

    architecture = "Ministral3ForCausalLM"
    model_types = ("ministral3",)
    implementation = "ministral3:Ministral3ForCausalLM"
    query_beta = True

    max_position_embeddings: Count = 262144
    num_key_value_heads: Count | None = 8
    head_dim: Count | None = 128
    rms_norm_eps: Number = 1e-5
    eos_token_id: Any = 2
    rope_parameters: dict[str, Any] = table(
        rope_type="yarn",
        rope_theta=1000000.0,
        factor=16.0,
        original_max_position_embeddings=16384,
        mscale=1.0,
        mscale_all_dim=1.0,
        llama_4_scaling_beta=0.1,
    )


class MixtralConfig(WindowedFamilyConfig):
    """Mixtral: Mistral with experts in all layers."""

    architecture = "MixtralForCausalLM"
    model_types = ("mixtral",)
    implementation = "mixtral:MixtralForCausalLM"
    harmless = ROUTER_KEYS | words("router_jitter_noise")

    max_position_embeddings: Count = 131072
    num_key_value_heads: Count | None = 8
    rms_norm_eps: Number = 1e-5
    rope_theta: Number = 1000000.0
    eos_token_id: Any = 2
    num_local_experts: Count = 8
    num_experts_per_tok: Count = 2

    def moe(self) -> MoeConfig:
        """Experts in all layers."""
        return MoeConfig(
            num_experts=self.num_local_experts,
            top_k=self.num_experts_per_tok,
            intermediate_size=self.intermediate_size,
        )


class Mistral4Config(LatentFamilyConfig):
    """Mistral Small 4: latent attention with queries scaled by position, and experts."""

    architecture = "Mistral4ForCausalLM"
    model_types = ("mistral4",)
    implementation = "deepseek:DeepseekForCausalLM"
    harmless = ROUTER_KEYS
    head_dim_is_whole = True
    query_beta = True

    max_position_embeddings: Count = 1048576
    num_key_value_heads: Count | None = 32
    eos_token_id: Any = 2
    rope_parameters: dict[str, Any] = table(
        rope_type="yarn",
        rope_theta=10000.0,
        factor=128.0,
        original_max_position_embeddings=8192,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=1.0,
        llama_4_scaling_beta=0.1,
    )
    partial_rotary_factor: Number | None = None
    kv_lora_rank: Count = 256
    q_lora_rank: Count | None = 1024
    qk_nope_head_dim: Count = 64
    n_routed_experts: Count = 128
    num_experts_per_tok: Count = 4
    moe_intermediate_size: Count = 2048
    n_shared_experts: Index = 1
    n_group: Index = 1
    topk_group: Index = 1
    first_k_dense_replace: Index = 0
    norm_topk_prob: bool = True
    routed_scaling_factor: Number = 1.0

    def moe(self) -> MoeConfig:
        """Experts as in DeepSeek V3, but scored by softmax and without a bias."""
        experts = grouped_experts(self, frozenset(range(self.first_k_dense_replace)))
        return replace(experts, sigmoid=False, has_bias=False)


FAMILIES = (MistralConfig, MinistralConfig, Ministral3Config, MixtralConfig, Mistral4Config)
MULTIMODAL = (
    MultimodalConfig(
        architectures=("Mistral3ForConditionalGeneration",),
        model_type="mistral3",
        texts={
            "mistral": "MistralForCausalLM",
            "ministral3": "Ministral3ForCausalLM",
            "mistral4": "Mistral4ForCausalLM",
        },
        keys=words(
            """
            vision_config image_token_index image_token_id multimodal_projector_bias
            projector_hidden_act spatial_merge_size vision_feature_layer
            """
        ),
        tensors=VISION_AND_PROJECTOR,
    ),
    MultimodalConfig(
        architectures=("VoxtralForConditionalGeneration",),
        model_type="voxtral",
        texts={"llama": "LlamaForCausalLM"},
        keys=words("audio_config audio_token_id projector_hidden_act"),
        tensors=language_model_and("audio_tower", "multi_modal_projector"),
    ),
)
