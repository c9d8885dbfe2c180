"""Schemas of OLMo 2, 3 and Hybrid, OLMoE and FlexOlmo (huggingface.co/allenai). Does not import
torch."""

from __future__ import annotations

from typing import Any

from worker.models.config.family import FULL, LINEAR, AlternatingFamilyConfig, FamilyConfig
from worker.models.config.moe_config import MoeConfig
from worker.models.config.schema import ROUTER_KEYS, Count, Index, Number, RawConfig, words


class Olmo2Config(FamilyConfig):
    """Schema of OLMo 2."""

    architecture = "Olmo2ForCausalLM"
    model_types = ("olmo2",)
    implementation = "olmo:Olmo2ForCausalLM"

    max_position_embeddings: Count = 2048
    rms_norm_eps: Number = 1e-5
    eos_token_id: Any = 50279
    attention_bias: bool = False


class Olmo3Config(AlternatingFamilyConfig):
    """OLMo 3: sliding windows in all but every fourth layer; only the full-attention layers have
    scaled rotary embedding."""

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


class OlmoHybridConfig(FamilyConfig):
    """OLMo Hybrid: linear attention in all but every fourth layer; the others have no rotary
    embedding if `rope_theta` is null."""

    architecture = "OlmoHybridForCausalLM"
    model_types = ("olmo_hybrid",)
    implementation = "olmo_hybrid:OlmoHybridForCausalLM"
    layer_kinds = (FULL, LINEAR)
    extra_keys = (
        *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"),
        *("linear_value_head_dim", "linear_conv_kernel_dim", "linear_allow_neg_eigval"),
    )
    harmless = words(
        "linear_a_log_min linear_a_log_max linear_dt_min linear_dt_max linear_dt_init_floor"
    )
    """Keys that only concern initial weights."""
    renamed_ends = (
        (".attention_layer_norm.weight", ".input_layernorm.weight"),
        (".feedforward_layer_norm.weight", ".post_attention_layernorm.weight"),
    )

    max_position_embeddings: Count = 65536
    eos_token_id: Any = 100257
    rope_theta: Number = 10000.0
    """Base of the rotary embedding; 0 (null in config.json) if there is none."""
    attention_bias: bool = False
    linear_num_key_heads: Index = 0
    linear_num_value_heads: Index = 0
    linear_key_head_dim: Index = 0
    linear_value_head_dim: Index = 0
    """Size of a value head; like other sizes of linear attention, derived from other keys if
    missing."""
    linear_conv_kernel_dim: Count = 4
    linear_allow_neg_eigval: bool = True
    """Whether step sizes are twice the sigmoid of their projection."""

    @classmethod
    def prepare(cls, raw: RawConfig) -> RawConfig:
        """config.json with a null `rope_theta` replaced by 0."""
        keys = super().prepare(raw)
        table = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        place = table if isinstance(table, dict) and "rope_theta" in table else raw
        if place.get("rope_theta", 10000.0) is None:
            keys["rope_theta"] = 0.0
        return keys

    def derive(self) -> None:
        """Sets sizes of linear attention that are missing."""
        heads = self.num_attention_heads
        self.linear_num_key_heads = self.linear_num_key_heads or heads
        self.linear_num_value_heads = self.linear_num_value_heads or heads
        share = 3 * self.hidden_size // (4 * self.linear_num_key_heads)
        self.linear_key_head_dim = self.linear_key_head_dim or share
        self.linear_value_head_dim = self.linear_value_head_dim or 2 * self.linear_key_head_dim

    def layer_kind(self, index: int) -> str:
        """Full attention in every fourth layer, or in the last layer if there are fewer than
        four."""
        count = self.num_hidden_layers
        return FULL if index % 4 == 3 or index == count - 1 < 3 else LINEAR

    def rotating(self) -> tuple[bool, ...]:
        """True for all layers, or False for all layers if there is no base."""
        return (self.rope_theta > 0,) * self.num_hidden_layers

    def divided(self) -> dict[str, int]:
        """The number of key heads of linear attention, which are divided among the ranks."""
        return {"the number of linear key heads": self.linear_num_key_heads}


class FlexOlmoConfig(FamilyConfig):
    """FlexOlmo: OLMo 2 with experts in all layers."""

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


FAMILIES = (Olmo2Config, Olmo3Config, OlmoHybridConfig, FlexOlmoConfig, OlmoeConfig)
