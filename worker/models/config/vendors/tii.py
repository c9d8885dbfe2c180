"""Schemas of Falcon (huggingface.co/tiiuae). Does not import torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from worker.models.config.family import Biases, FamilyConfig
from worker.models.config.mamba_config import MambaConfig, checked_mamba, mamba_head_dim
from worker.models.config.schema import Count, Index, No, Number, Yes, only, short, words


class FalconConfig(FamilyConfig):
    """Falcon 7B: one KV head, and attention and MLP in parallel after one LayerNorm."""

    architecture = "FalconForCausalLM"
    model_types = ("falcon",)
    implementation = "falcon:FalconForCausalLM"
    harmless = words("num_kv_heads apply_residual_connection_post_layernorm")
    aliases = (("n_head", "num_attention_heads"), ("n_layer", "num_hidden_layers"))

    max_position_embeddings: Count = 2048
    layer_norm_epsilon: Number = 1e-5
    tie_word_embeddings: bool = True
    eos_token_id: Any = 11
    intermediate_size: Index = 0
    """`ffn_hidden_size`, or four times `hidden_size`."""
    ffn_hidden_size: Index = 0
    activation: Annotated[str, only("gelu")] = "gelu"
    bias: bool = False
    multi_query: Yes = True
    num_ln_in_parallel_attn: Literal[1] = 1
    parallel_attn: Yes = True

    def derive(self) -> None:
        """Sets the number of KV heads to 1, the intermediate size, and the epsilon of norms."""
        self.num_key_value_heads = 1
        self.intermediate_size = self.ffn_hidden_size or 4 * self.hidden_size
        self.rms_norm_eps = self.layer_norm_epsilon

    def biases(self) -> Biases:
        """Biases of all projections."""
        return Biases(self.bias, self.bias, self.bias)


class FalconH1Config(FamilyConfig):
    """Falcon-H1: Mamba-2 and attention in parallel in all layers, and scaled activations."""

    architecture = "FalconH1ForCausalLM"
    model_types = ("falcon_h1",)
    implementation = "falcon_h1:FalconH1ForCausalLM"
    harmless = words("mamba_chunk_size num_logits_to_keep")
    extra_keys = (
        *("embedding_multiplier", "lm_head_multiplier", "mlp_multipliers", "key_multiplier"),
        *("attention_in_multiplier", "attention_out_multiplier", "ssm_out_multiplier"),
    )

    num_key_value_heads: Count | None = 8
    max_position_embeddings: Count = 8192
    rms_norm_eps: Number = 1e-5
    eos_token_id: Any = 2
    attention_bias: bool = False
    embedding_multiplier: Number = 1.0
    lm_head_multiplier: Number = 1.0
    mlp_multipliers: list[Number] | None = None
    key_multiplier: Number = 1.0
    attention_in_multiplier: Number = 1.0
    attention_out_multiplier: Number = 1.0
    ssm_multipliers: list[Number] | None = None
    ssm_in_multiplier: Number = 1.0
    ssm_out_multiplier: Number = 1.0
    mamba_d_ssm: Count | None = 1024
    mamba_n_heads: Count = 128
    mamba_d_head: Count | Literal["auto"] = "auto"
    mamba_n_groups: Count = 1
    mamba_d_state: Count = 256
    mamba_d_conv: Count = 4
    mamba_expand: Count = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: No = False
    mamba_norm_before_gate: bool = True
    mamba_rms_norm: bool = False
    mamba_use_mlp: Yes = True
    projectors_bias: bool = False
    time_step_limit: list[Any] | None = None

    def derive(self) -> None:
        """Sets the MLP multipliers if they are missing; raises ValueError for a wrong number of
        multipliers."""
        self.mlp_multipliers = self.mlp_multipliers or [1.0, 1.0]
        for key, count in (("mlp_multipliers", 2), ("ssm_multipliers", 5)):
            if (values := getattr(self, key)) and len(values) != count:
                raise ValueError(
                    f"{key} = {short(values)} in config.json must be a list of {count} numbers: "
                    "fix it"
                )

    def linear_layers(self) -> frozenset[int]:
        """All layers: each keeps a state, in addition to keys and values."""
        return frozenset(range(self.num_hidden_layers))

    def mamba(self) -> MambaConfig:
        """Mamba-2 layers, possibly without a norm. `ssm_in_multiplier`, the factor of their input,
        is part of `multipliers`."""
        size = self.mamba_d_ssm or self.mamba_expand * self.hidden_size
        num_heads = self.mamba_n_heads
        before = self.mamba_norm_before_gate
        factors = self.ssm_multipliers or [1.0] * 5
        config = MambaConfig(
            num_heads=num_heads,
            head_dim=mamba_head_dim(size, num_heads, self.mamba_d_head, "mamba_d_ssm"),
            num_groups=self.mamba_n_groups,
            state_dim=self.mamba_d_state,
            num_taps=self.mamba_d_conv,
            conv_bias=self.mamba_conv_bias,
            output_bias=self.projectors_bias,
            order=("norm first" if before else "gate first") if self.mamba_rms_norm else "no norm",
            multipliers=tuple(self.ssm_in_multiplier * factor for factor in factors),
        )
        return checked_mamba(config, "mamba_n_heads", "mamba_n_groups", self.time_step_limit)


FAMILIES = (FalconConfig, FalconH1Config)
