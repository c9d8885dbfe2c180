"""Schema of Solar Open (huggingface.co/upstage). Does not import torch."""

from __future__ import annotations

from worker.models.config.family import Biases, FamilyConfig
from worker.models.config.moe_config import MoeConfig, grouped_experts
from worker.models.config.schema import ROUTER_KEYS, Count, Index, Number


class SolarOpenConfig(FamilyConfig):
    """Solar Open: GLM-4.5 with experts in all layers."""

    architecture = "SolarOpenForCausalLM"
    model_types = ("solar_open",)
    implementation = "glm4_moe:Glm4MoeForCausalLM"
    harmless = ROUTER_KEYS

    intermediate_size: Count = 10240
    """Unused, since all layers have experts."""
    max_position_embeddings: Count = 131072
    num_key_value_heads: Count | None = 8
    head_dim: Count | None = 128
    rms_norm_eps: Number = 1e-5
    rope_theta: Number = 1000000.0
    attention_bias: bool = False
    n_routed_experts: Count = 128
    num_experts_per_tok: Count = 8
    moe_intermediate_size: Count = 1280
    n_shared_experts: Index = 1
    n_group: Index = 1
    topk_group: Index = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: Number = 1.0

    def biases(self) -> Biases:
        """Biases of q, k and v."""
        return Biases(qkv=self.attention_bias)

    def moe(self) -> MoeConfig:
        """Experts in all layers."""
        return grouped_experts(self, frozenset())


FAMILIES = (SolarOpenConfig,)
