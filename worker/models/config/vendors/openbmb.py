"""MiniCPM (huggingface.co/openbmb). Imports no torch."""

from __future__ import annotations

from typing import Any

from worker.models.config.family import FamilyConfig
from worker.models.config.moe_config import MoeConfig
from worker.models.config.schema import Count, Index, Number


class MiniCPMConfig(FamilyConfig):
    """MiniCPM 1 and 2, dense or with experts: scales as in Granite, by other keys."""

    architecture = "MiniCPMForCausalLM"
    model_types = ("minicpm",)
    implementation = "granite:MiniCPMForCausalLM"

    max_position_embeddings: Count = 2048
    tie_word_embeddings: bool = True
    eos_token_id: Any = 2
    attention_bias: bool = False
    scale_emb: Number = 1
    scale_depth: Number = 1
    dim_model_base: Count = 1
    num_experts: Index = 0
    num_experts_per_tok: Count | None = None

    def extra(self) -> dict[str, Any]:
        """The scales, by Granite's keys."""
        return {
            "embedding_multiplier": self.scale_emb,
            "attention_multiplier": max(1, self.hidden_size // self.num_attention_heads) ** -0.5,
            "residual_multiplier": self.scale_depth * self.num_hidden_layers**-0.5,
            "logits_scaling": self.hidden_size / self.dim_model_base,
        }

    def moe(self) -> MoeConfig | None:
        """Experts in all layers, if the model has any."""
        if not self.num_experts:
            return None
        if self.num_experts_per_tok is None:
            raise ValueError(
                "num_experts_per_tok is missing in config.json: it must be a positive integer"
            )
        return MoeConfig(
            num_experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            intermediate_size=self.intermediate_size,
        )


FAMILIES = (MiniCPMConfig,)
