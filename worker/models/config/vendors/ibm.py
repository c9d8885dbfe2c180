"""Schemas of Granite (huggingface.co/ibm-granite). Does not import torch."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from worker.models.config.family import FULL, LINEAR, SLIDING, FamilyConfig
from worker.models.config.mamba_config import MambaConfig, checked_mamba, mamba_head_dim
from worker.models.config.moe_config import MoeConfig
from worker.models.config.schema import ROUTER_KEYS, Count, Index, No, Number, short, words


class GraniteConfig(FamilyConfig):
    """Dense Granite 3: embeddings, blocks, scores and logits are scaled."""

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


class GraniteMoeSharedConfig(GraniteMoeConfig):
    """Granite with experts and an optional shared MLP in all layers."""

    architecture = "GraniteMoeSharedForCausalLM"
    model_types = ("granitemoeshared",)
    implementation = "granite:GraniteMoeSharedForCausalLM"
    extra_keys = (*GraniteConfig.extra_keys, "shared_intermediate_size")

    shared_intermediate_size: Index = 0
    """Intermediate size of the shared MLP; 0 if there is none."""

    def divided(self) -> dict[str, int]:
        """The intermediate size of the shared MLP, which is divided among the ranks, if there is
        one."""
        return _shared_mlp(self.shared_intermediate_size)


class GraniteSWAConfig(GraniteConfig):
    """Granite with sliding windows in all but every fourth layer, attention sinks, and a per-layer
    base of the rotary embedding."""

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
    """Base of each layer's rotary embedding; 0 for a layer without rotary embedding."""

    def derive(self) -> None:
        """Sets the rotary bases, if they are missing, to the same one for all layers; raises
        ValueError if their number is not that of the layers."""
        table, count = self.rope_parameters or {}, self.num_hidden_layers
        if self.layer_rope_theta is None:
            self.layer_rope_theta = [table.get("rope_theta") or self.rope_theta] * count
        if len(thetas := self.layer_rope_theta) != count:
            raise ValueError(
                f"layer_rope_theta = {short(thetas)} in config.json must have a rotary base for "
                f"each of the {count} layers: fix it"
            )

    def layer_kind(self, index: int) -> str:
        """Full attention in the first of every four layers."""
        return SLIDING if index % 4 else FULL

    def window(self) -> int | None:
        """Sliding window in tokens."""
        return self.sliding_window


class GraniteMoeSWAConfig(GraniteSWAConfig):
    """Granite SWA with experts and an optional shared MLP in all layers."""

    architecture = "GraniteMoeSWAForCausalLM"
    model_types = ("granitemoe_swa",)
    implementation = "granite:GraniteMoeSWAForCausalLM"
    harmless = ROUTER_KEYS
    extra_keys = (*GraniteSWAConfig.extra_keys, "shared_intermediate_size")

    num_key_value_heads: Count | None = None
    max_position_embeddings: Count = 2048
    rms_norm_eps: Number = 1e-6
    tie_word_embeddings: bool = False
    eos_token_id: Any = 2
    mlp_bias: No = False
    num_local_experts: Count = 8
    num_experts_per_tok: Count = 2
    shared_intermediate_size: Index = 0

    def moe(self) -> MoeConfig:
        """Experts as in Mixtral."""
        return MoeConfig(
            num_experts=self.num_local_experts,
            top_k=self.num_experts_per_tok,
            intermediate_size=self.intermediate_size,
        )

    def divided(self) -> dict[str, int]:
        """The intermediate size of the shared MLP, which is divided among the ranks, if there is
        one."""
        return _shared_mlp(self.shared_intermediate_size)


class GraniteMoeHybridConfig(GraniteConfig):
    """Granite 4: Mamba-2 in most layers and attention in the others, or attention in all layers.
    Dense, or with experts next to a shared MLP."""

    architecture = "GraniteMoeHybridForCausalLM"
    model_types = ("granitemoehybrid",)
    implementation = "granite:GraniteMoeHybridForCausalLM"
    layer_kinds = (FULL, LINEAR)
    kind_aliases: ClassVar[dict[str, str]] = {"attention": FULL, "mamba": LINEAR}
    aliases = (("layers_block_type", "layer_types"),)
    harmless = ROUTER_KEYS | words("init_method mamba_chunk_size")
    extra_keys = (*GraniteConfig.extra_keys, "shared_intermediate_size")

    mlp_bias: No = False
    num_local_experts: Index = 8
    num_experts_per_tok: Index = 2
    shared_intermediate_size: Count = 1024
    position_embedding_type: Literal["nope", "rope"] | None = None
    normalization_function: Literal["rmsnorm"] = "rmsnorm"
    mamba_n_heads: Count = 128
    mamba_n_groups: Count = 1
    mamba_d_state: Count = 256
    mamba_d_head: Count | Literal["auto"] = "auto"
    mamba_d_conv: Count = 4
    mamba_expand: Count = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: list[Any] | None = None

    def derive(self) -> None:
        """Sets the size of a dense model's MLP."""
        if not self.num_local_experts:
            self.intermediate_size = self.shared_intermediate_size

    def rotating(self) -> tuple[bool, ...]:
        """True for all layers, or False for all layers if positions are not embedded ("nope")."""
        return (self.position_embedding_type == "rope",) * self.num_hidden_layers

    def moe(self) -> MoeConfig | None:
        """Experts as in Granite 3, if there are any."""
        if not self.num_local_experts:
            return None
        return MoeConfig(
            num_experts=self.num_local_experts,
            top_k=self.num_experts_per_tok,
            intermediate_size=self.intermediate_size,
        )

    def mamba(self) -> MambaConfig:
        """Mamba-2 layers, whose output is gated before the norm."""
        size, num_heads = self.mamba_expand * self.hidden_size, self.mamba_n_heads
        config = MambaConfig(
            num_heads=num_heads,
            head_dim=mamba_head_dim(size, num_heads, self.mamba_d_head, "mamba_expand"),
            num_groups=self.mamba_n_groups,
            state_dim=self.mamba_d_state,
            num_taps=self.mamba_d_conv,
            conv_bias=self.mamba_conv_bias,
            input_bias=self.mamba_proj_bias,
            output_bias=self.mamba_proj_bias,
        )
        return checked_mamba(config, "mamba_n_heads", "mamba_n_groups", self.time_step_limit)

    def divided(self) -> dict[str, int]:
        """The intermediate size of the shared MLP, which is divided among the ranks."""
        return _shared_mlp(self.shared_intermediate_size)


def _shared_mlp(size: int) -> dict[str, int]:
    """The shared MLP's size by its description, as in `FamilyConfig.divided`; empty if `size`
    is 0."""
    return {"the size of the shared MLP": size} if size else {}


FAMILIES = (
    *(GraniteConfig, GraniteMoeConfig, GraniteMoeSharedConfig),
    *(GraniteSWAConfig, GraniteMoeSWAConfig, GraniteMoeHybridConfig),
)
