"""Schemas of AFM and Trinity (huggingface.co/arcee-ai). Does not import torch."""

from __future__ import annotations

from typing import Any, Literal

from worker.models.config.family import AlternatingFamilyConfig, FamilyConfig
from worker.models.config.moe_config import MoeConfig
from worker.models.config.schema import ROUTER_KEYS, Count, Index, Number, Yes, words


class ArceeConfig(FamilyConfig):
    """AFM: Llama with an ungated MLP."""

    architecture = "ArceeForCausalLM"
    model_types = ("arcee",)
    implementation = "arcee:ArceeForCausalLM"

    max_position_embeddings: Count = 4096
    rms_norm_eps: Number = 1e-5
    eos_token_id: Any = 128001
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: Literal["relu2"] = "relu2"


class AfmoeConfig(AlternatingFamilyConfig):
    """Trinity: gated attention with sliding windows in all but every fourth layer, which has no
    rotary embedding; experts in all but the first few layers."""

    architecture = "AfmoeForCausalLM"
    model_types = ("afmoe",)
    implementation = "afmoe:AfmoeForCausalLM"
    harmless = ROUTER_KEYS | words("load_balance_coeff use_grouped_mm")
    aliases = (
        ("global_attn_every_n_layers", "sliding_window_pattern"),
        ("num_local_experts", "num_experts"),
    )
    extra_keys = ("mup_enabled",)

    max_position_embeddings: Count = 16384
    head_dim: Count | None = 128
    rms_norm_eps: Number = 1e-5
    use_qk_norm: Yes = True
    sliding_window: Index | None = 1024
    sliding_window_pattern: Index | str = 4
    mup_enabled: bool = False
    num_dense_layers: Index = 1
    num_experts: Count = 64
    num_experts_per_tok: Count = 6
    num_shared_experts: Index = 2
    moe_intermediate_size: Count = 1408
    n_group: Literal[1] = 1
    topk_group: Literal[1] = 1
    num_expert_groups: Literal[1] = 1
    num_limited_groups: Literal[1] = 1
    score_func: Literal["sigmoid"] = "sigmoid"
    route_norm: Yes = True
    route_scale: Number = 1.0

    def moe(self) -> MoeConfig:
        """Experts as in DeepSeek V3, without groups."""
        return MoeConfig(
            num_experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            intermediate_size=self.moe_intermediate_size,
            dense_layers=frozenset(range(min(self.num_dense_layers, self.num_hidden_layers))),
            sigmoid=True,
            has_bias=True,
            scale=self.route_scale,
            shared_size=self.moe_intermediate_size * self.num_shared_experts,
        )


FAMILIES = (ArceeConfig, AfmoeConfig)
