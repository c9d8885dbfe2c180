"""Granite (huggingface.co/ibm-granite). Imports no torch."""

from __future__ import annotations

from typing import Any

from worker.models.config.family import FamilyConfig
from worker.models.config.moe_config import MoeConfig
from worker.models.config.schema import ROUTER_KEYS, Count, No, Number


class GraniteConfig(FamilyConfig):
    """Granite 3, dense: embeddings, blocks, scores and logits are scaled."""

    architecture = "GraniteForCausalLM"
    model_types = ("granite",)
    implementation = "granite:GraniteForCausalLM"
    extra_keys = (
        *("embedding_multiplier", "attention_multiplier", "residual_multiplier"),
        "logits_scaling",
    )

    max_position_embeddings: Count = 2048
    eos_token_id: Any = 2
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: Number = 1.0
    attention_multiplier: Number = 1.0
    residual_multiplier: Number = 1.0
    logits_scaling: Number = 1.0


class GraniteMoeConfig(GraniteConfig):
    """Granite 3 with experts in all layers."""

    architecture = "GraniteMoeForCausalLM"
    model_types = ("granitemoe",)
    implementation = "granite:GraniteMoeForCausalLM"
    harmless = ROUTER_KEYS

    mlp_bias: No = False
    num_local_experts: Count = 8
    num_experts_per_tok: Count = 2

    def moe(self) -> MoeConfig:
        """Experts as in Mixtral."""
        return MoeConfig(
            num_experts=self.num_local_experts,
            top_k=self.num_experts_per_tok,
            intermediate_size=self.intermediate_size,
        )


FAMILIES = (GraniteConfig, GraniteMoeConfig)
