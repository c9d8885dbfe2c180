"""Schema of gpt-oss (huggingface.co/openai). Does not import torch."""

from __future__ import annotations

from typing import Any

from worker.models.config.family import AlternatingFamilyConfig, table
from worker.models.config.moe_config import MoeConfig
from worker.models.config.schema import ROUTER_KEYS, Count, Index, Number, words


class GptOssConfig(AlternatingFamilyConfig):
    """gpt-oss: attention sinks, sliding windows in every other layer, and experts in MXFP4."""

    architecture = "GptOssForCausalLM"
    model_types = ("gpt_oss",)
    implementation = "gpt_oss:GptOssForCausalLM"
    harmless = ROUTER_KEYS | words("experts_per_token initial_context_length")
    extra_keys = ("swiglu_alpha", "swiglu_limit")
    has_sinks = True
    mxfp4_experts = True

    max_position_embeddings: Count = 131072
    num_key_value_heads: Count | None = 8
    head_dim: Count | None = 64
    rms_norm_eps: Number = 1e-5
    rope_theta: Number = 150000.0
    rope_parameters: dict[str, Any] = table(
        rope_type="yarn",
        factor=32.0,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=False,
        original_max_position_embeddings=4096,
    )
    attention_bias: bool = True
    sliding_window: Index | None = 128
    sliding_window_pattern: Index | str = 2
    num_local_experts: Count = 128
    num_experts_per_tok: Count = 4
    swiglu_alpha: Number = 1.702
    swiglu_limit: Number = 7.0

    def moe(self) -> MoeConfig:
        """Experts in all layers."""
        return MoeConfig(
            num_experts=self.num_local_experts,
            top_k=self.num_experts_per_tok,
            intermediate_size=self.intermediate_size,
        )


FAMILIES = (GptOssConfig,)
