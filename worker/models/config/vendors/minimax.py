"""MiniMax-M2 (huggingface.co/MiniMaxAI). Imports no torch."""

from __future__ import annotations

from typing import Any, Literal

from worker.models.config.family import FamilyConfig, rotary_size
from worker.models.config.moe_config import MoeConfig
from worker.models.config.schema import ROUTER_KEYS, Count, Number, Yes, short, words


class MiniMaxM2Config(FamilyConfig):
    """MiniMax-M2: QK norm over all heads together, rotary embedding of part of each head, and
    experts in all layers."""

    architecture = "MiniMaxM2ForCausalLM"
    model_types = ("minimax_m2",)
    implementation = "minimax_m2:MiniMaxM2ForCausalLM"
    harmless = ROUTER_KEYS | words(
        "use_mtp num_mtp_modules mtp_transformer_layers router_jitter_noise"
    )

    max_position_embeddings: Count = 196608
    num_key_value_heads: Count | None = 8
    head_dim: Count | None = 128
    partial_rotary_factor: Number | None = None
    rotary_dim: Count | None = None
    rope_theta: Number = 5000000.0
    eos_token_id: Any = 200020
    attn_type_list: list[int] | None = None
    use_qk_norm: Yes = True
    qk_norm_type: Literal["per_layer"] = "per_layer"
    num_local_experts: Count = 256
    num_experts_per_tok: Count = 8
    scoring_func: Literal["sigmoid"] = "sigmoid"
    use_routing_bias: Yes = True

    def derive(self) -> None:
        """Checks that all layers have full attention (1), not linear attention (0)."""
        kinds, count = self.attn_type_list, self.num_hidden_layers
        if kinds is not None and kinds != [1] * count:
            raise ValueError(
                f"attn_type_list = {short(kinds)} in config.json is not supported: it must be 1 "
                f"for each of {count} layers; use another checkpoint"
            )

    def rotary_size(self) -> int:
        """Number of leading dimensions of a head with rotary embedding."""
        return rotary_size(self, self.rotary_dim)

    def moe(self) -> MoeConfig:
        """Experts in all layers, scored by sigmoids, with a bias for the choice."""
        return MoeConfig(
            num_experts=self.num_local_experts,
            top_k=self.num_experts_per_tok,
            intermediate_size=self.intermediate_size,
            sigmoid=True,
            has_bias=True,
        )


FAMILIES = (MiniMaxM2Config,)
