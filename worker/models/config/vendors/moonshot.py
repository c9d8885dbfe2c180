"""Schema of Kimi Linear (huggingface.co/moonshotai). Does not import torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from worker.models.config.family import FULL, LINEAR
from worker.models.config.latent_family import LatentFamilyConfig
from worker.models.config.moe_config import MoeConfig, grouped_experts, listed_dense_layers
from worker.models.config.schema import ROUTER_KEYS, Count, Index, No, Number, Yes, only, short
from worker.protocol.analyzed import analyzed


class _LinearAttention(msgspec.Struct, forbid_unknown_fields=True):
    """`linear_attn_config`: sizes of linear attention, and the 1-based layer indices of each
    type."""

    head_dim: Count
    num_heads: Count
    short_conv_kernel_size: Count
    kda_layers: list[Count]
    full_attn_layers: list[Count]


class KimiLinearConfig(LatentFamilyConfig):
    """Kimi Linear: linear attention (KDA) in three out of four layers, latent attention without
    rotary embedding in the others."""

    architecture = "KimiLinearForCausalLM"
    model_types = ("kimi_linear",)
    implementation = "kimi_linear:KimiLinearForCausalLM"
    harmless = ROUTER_KEYS
    aliases = (
        ("model_max_length", "max_position_embeddings"),
        ("moe_renormalize", "norm_topk_prob"),
        ("num_expert_group", "n_group"),
        ("num_experts", "n_routed_experts"),
        ("num_local_experts", "n_routed_experts"),
        ("num_experts_per_token", "num_experts_per_tok"),
        ("num_shared_experts", "n_shared_experts"),
    )
    extra_keys = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    layer_kinds = (FULL, LINEAR)

    max_position_embeddings: Count = 1048576
    rms_norm_eps: Number = 1e-5
    eos_token_id: Any = 163586
    rope_scaling: Annotated[dict[str, Any] | None, only(None)] = None
    rope_parameters: Annotated[dict[str, Any] | None, only(None)] = None
    rope_interleave: No = False
    mla_use_nope: Yes = True
    """Whether latent attention has no rotary embedding."""
    q_lora_rank: Count | None = None
    linear_attn_config: dict[str, Any] | None = None
    """Sizes and layers of linear attention, for which transformers writes `layer_types` and the
    next three fields instead."""
    linear_num_heads: Count = 32
    linear_head_dim: Count = 128
    linear_conv_kernel_dim: Count = 4
    n_routed_experts: Count = 256
    num_experts_per_tok: Count = 8
    moe_intermediate_size: Count = 1024
    n_shared_experts: Index = 1
    n_group: Count = 1
    topk_group: Count = 1
    use_grouped_topk: Yes = True
    norm_topk_prob: bool = True
    routed_scaling_factor: Number = 2.446
    moe_router_activation_func: Literal["sigmoid"] = "sigmoid"
    moe_layer_freq: Literal[1] = 1
    first_k_dense_replace: Index | None = None

    def derive(self) -> None:
        """Reads `linear_attn_config`. Drops `head_dim` if it is the hidden size divided by the
        number of heads, a size that no layer uses."""
        if self.head_dim == self.hidden_size // self.num_attention_heads:
            self.head_dim = None
        table = self.linear_attn_config
        if table is None:
            return
        try:
            linear = msgspec.convert(table, analyzed(_LinearAttention))
        except msgspec.ValidationError as error:
            raise ValueError(
                f"linear_attn_config = {short(table)} in config.json is not supported: it must be "
                f"an object with {', '.join(_LinearAttention.__struct_fields__)} ({error})"
            ) from None
        self.linear_num_heads = linear.num_heads
        self.linear_head_dim = linear.head_dim
        self.linear_conv_kernel_dim = linear.short_conv_kernel_size
        self._set_layers(linear)

    def _set_layers(self, linear: _LinearAttention) -> None:
        """Sets `layer_types`; raises ValueError if lists of layers contradict each other."""
        count, full = self.num_hidden_layers, linear.full_attn_layers
        if sorted((*full, *linear.kda_layers)) != list(range(1, count + 1)):
            raise ValueError(
                "kda_layers and full_attn_layers of linear_attn_config in config.json must list "
                f"each layer from 1 to {count} once: fix it"
            )
        kinds = [FULL if layer in full else LINEAR for layer in range(1, count + 1)]
        if self.layer_types not in (None, kinds):
            raise ValueError(
                "layer_types and linear_attn_config in config.json disagree: make them consistent"
            )
        self.layer_types = kinds

    def layer_kind(self, index: int) -> str:
        """Full attention in layers 4, 8, 12 and so on (0-based), otherwise linear attention."""
        return FULL if index and index % 4 == 0 else LINEAR

    def rotating(self) -> tuple[bool, ...]:
        """False for all layers, since none has rotary embedding."""
        return (False,) * self.num_hidden_layers

    def divided(self) -> dict[str, int]:
        """The number of heads of linear attention, which are divided among the ranks."""
        return {"the number of linear heads": self.linear_num_heads}

    def moe(self) -> MoeConfig:
        """Experts in all but the first layer, unless config.json lists others."""
        dense = listed_dense_layers(
            self.mlp_layer_types, self.num_hidden_layers, self.first_k_dense_replace
        )
        return grouped_experts(self, dense)


FAMILIES = (KimiLinearConfig,)
