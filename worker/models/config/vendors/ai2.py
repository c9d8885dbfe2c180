"""OLMo 2 and 3, OLMoE and FlexOlmo (huggingface.co/allenai). Imports no torch."""

from __future__ import annotations

from typing import Any

from worker.models.config.family import AlternatingFamilyConfig, FamilyConfig
from worker.models.config.moe_config import MoeConfig
from worker.models.config.schema import ROUTER_KEYS, Count, Index, Number


class Olmo2Config(FamilyConfig):
    """OLMo 2."""

    architecture = "Olmo2ForCausalLM"
    model_types = ("olmo2",)
    implementation = "olmo:Olmo2ForCausalLM"

    max_position_embeddings: Count = 2048
    rms_norm_eps: Number = 1e-5
    eos_token_id: Any = 50279
    attention_bias: bool = False


class Olmo3Config(AlternatingFamilyConfig):
    """OLMo 3: sliding windows in all but every fourth layer; only the others have scaled rotary
    embedding."""

    architecture = "Olmo3ForCausalLM"
    model_types = ("olmo3",)
    implementation = "olmo:Olmo2ForCausalLM"
    window_theta = "rope_theta"

    max_position_embeddings: Count = 2048
    rms_norm_eps: Number = 1e-5
    rope_theta: Number = 500000.0
    eos_token_id: Any = 50279
    attention_bias: bool = False
    sliding_window: Index | None = 4096
    sliding_window_pattern: Index | str = 4


class FlexOlmoConfig(FamilyConfig):
    """FlexOlmo, with experts in all layers."""

    architecture = "FlexOlmoForCausalLM"
    model_types = ("flex_olmo",)
    implementation = "olmo:FlexOlmoForCausalLM"
    harmless = ROUTER_KEYS
    aliases = (("num_local_experts", "num_experts"),)

    max_position_embeddings: Count = 4096
    rope_theta: Number = 500000.0
    eos_token_id: Any = 100257
    attention_bias: bool = False
    num_experts: Count = 7
    num_experts_per_tok: Count = 5
    norm_topk_prob: bool = False

    def moe(self) -> MoeConfig:
        """Experts in all layers."""
        return MoeConfig(
            num_experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            intermediate_size=self.intermediate_size,
            normalize=self.norm_topk_prob,
        )


class OlmoeConfig(FlexOlmoConfig):
    """OLMoE: experts in all layers, and norms before the blocks."""

    architecture = "OlmoeForCausalLM"
    model_types = ("olmoe",)
    implementation = "olmo:OlmoeForCausalLM"

    rms_norm_eps: Number = 1e-5
    rope_theta: Number = 10000.0
    eos_token_id: Any = 50279
    num_experts: Count = 64
    num_experts_per_tok: Count = 8


FAMILIES = (Olmo2Config, Olmo3Config, FlexOlmoConfig, OlmoeConfig)
