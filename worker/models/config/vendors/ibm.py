"""Granite (huggingface.co/ibm-granite). Imports no torch."""

from __future__ import annotations

from typing import Any, ClassVar

from worker.models.config.family import FULL, SLIDING, FamilyConfig
from worker.models.config.moe_config import MoeConfig
from worker.models.config.schema import ROUTER_KEYS, Count, Index, No, Number, short


class GraniteConfig(FamilyConfig):
    """Granite 3, dense: embeddings, blocks, scores and logits are scaled."""

    architecture = "GraniteForCausalLM"
    model_types = ("granite",)
    implementation = "granite:GraniteForCausalLM"
    extra_keys: ClassVar[tuple[str, ...]] = (
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


class GraniteSWAConfig(GraniteConfig):
    """Granite with sliding windows in all but every fourth layer, attention sinks, and a base of
    the rotary embedding by layer."""

    architecture = "GraniteSWAForCausalLM"
    model_types = ("granite_swa",)
    implementation = "granite:GraniteSWAForCausalLM"
    layer_kinds = (FULL, SLIDING)
    has_sinks = True
    extra_keys = (*GraniteConfig.extra_keys, "layer_rope_theta")

    max_position_embeddings: Count = 8192
    num_key_value_heads: Count | None = 4
    rms_norm_eps: Number = 1e-5
    tie_word_embeddings: bool = True
    eos_token_id: Any = 100257
    sliding_window: Index | None = 128
    layer_rope_theta: list[Number] | None = None
    """Base of each layer's rotary embedding; 0 for a layer without."""

    def derive(self) -> None:
        """Checks the number of bases; if they are missing, all layers have the common one."""
        table, count = self.rope_parameters or {}, self.num_hidden_layers
        if self.layer_rope_theta is None:
            self.layer_rope_theta = [table.get("rope_theta") or self.rope_theta] * count
        if len(thetas := self.layer_rope_theta) != count:
            raise ValueError(
                f"layer_rope_theta = {short(thetas)} in config.json must have a number for each of "
                f"{count} layers: fix it"
            )

    def layer_kind(self, index: int) -> str:
        """Full attention in the first of every four layers."""
        return SLIDING if index % 4 else FULL

    def window(self) -> int | None:
        """The sliding window."""
        return self.sliding_window


FAMILIES = (GraniteConfig, GraniteMoeConfig, GraniteSWAConfig)
