"""Schemas of MiniCPM (huggingface.co/openbmb). Does not import torch."""

from __future__ import annotations

from typing import Any

from worker.models.config.family import FamilyConfig
from worker.models.config.latent_family import LatentFamilyConfig
from worker.models.config.moe_config import MoeConfig
from worker.models.config.schema import Count, Index, No, Number, words


class MiniCPMConfig(FamilyConfig):
    """MiniCPM 1 and 2, dense or with experts: scales as in Granite, with different keys."""

    architecture = "MiniCPMForCausalLM"
    model_types = ("minicpm",)
    implementation = "granite:MiniCPMForCausalLM"
    harmless = words("mup_denominator")
    """Scales the residual stream of MiniCPM4's EAGLE head, instead of the number of layers."""

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
        """The scales, under Granite's keys."""
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
                "num_experts_per_tok is missing from config.json: set it to a positive integer"
            )
        return MoeConfig(
            num_experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            intermediate_size=self.intermediate_size,
        )


class MiniCPM3Config(LatentFamilyConfig):
    """MiniCPM3: multi-head latent attention, and the scales of MiniCPM."""

    architecture = "MiniCPM3ForCausalLM"
    model_types = ("minicpm3",)
    implementation = "minicpm3:MiniCPM3ForCausalLM"

    num_key_value_heads: Count | None = 40
    max_position_embeddings: Count = 32768
    rms_norm_eps: Number = 1e-5
    tie_word_embeddings: bool = True
    eos_token_id: Any = 2
    kv_lora_rank: Count = 256
    q_lora_rank: Count | None = 768
    qk_nope_head_dim: Count = 64
    qk_rope_head_dim: Count = 32
    v_head_dim: Index = 0
    """Dimensions of a head's values; if missing, the hidden size divided by the number of heads."""
    rope_interleave: No = False
    scale_emb: Number = 12
    scale_depth: Number | None = 1.4
    """Factor from which the scale of blocks is derived; null if blocks are not scaled."""
    dim_model_base: Count | None = 256

    def derive(self) -> None:
        """Sets the size of values if it is missing."""
        self.v_head_dim = self.v_head_dim or self.hidden_size // self.num_attention_heads

    def extra(self) -> dict[str, Any]:
        """The scales, under Granite's keys."""
        depth, base = self.scale_depth, self.dim_model_base
        return {
            "embedding_multiplier": self.scale_emb,
            "residual_multiplier": 1.0 if depth is None else depth * self.num_hidden_layers**-0.5,
            "logits_scaling": 1.0 if base is None else self.hidden_size / base,
        }


FAMILIES = (MiniCPMConfig, MiniCPM3Config)
