"""Schemas of Phi (huggingface.co/microsoft). Does not import torch."""

from __future__ import annotations

from typing import Any, Literal, Self

from worker.models.config.family import Biases, FamilyConfig, WindowedFamilyConfig, rotary_size
from worker.models.config.moe_config import MoeConfig
from worker.models.config.schema import (
    ROUTER_KEYS,
    Count,
    Index,
    Number,
    RawConfig,
    Yes,
    words,
)


class PhiConfig(FamilyConfig):
    """Schema of Phi 1 to 2."""

    architecture = "PhiForCausalLM"
    model_types = ("phi",)
    implementation = "phi:PhiForCausalLM"

    max_position_embeddings: Count = 2048
    layer_norm_eps: Number = 1e-5
    partial_rotary_factor: Number = 0.5
    rotary_dim: Count | None = None
    eos_token_id: Any = 2
    hidden_act: Literal["gelu_pytorch_tanh", "gelu_new"] = "gelu_new"

    @classmethod
    def read(cls, raw: RawConfig) -> Self:
        """Reads the content of config.json. Raises ValueError like `FamilyConfig.read`, and for
        checkpoints that predate transformers' support for Phi."""
        if raw.get("model_type") == "phi-msft":
            raise ValueError(
                "model_type 'phi-msft' in config.json is not supported: this checkpoint predates "
                "transformers' support for Phi; use the current revision of its repository"
            )
        return super().read(raw)

    def derive(self) -> None:
        """Sets the epsilon of norms."""
        self.rms_norm_eps = self.layer_norm_eps

    def rotary_size(self) -> int:
        """Number of leading dimensions per head that have rotary embedding."""
        return rotary_size(self, self.rotary_dim)

    def biases(self) -> Biases:
        """Biases of all projections."""
        return Biases(True, True, True)


class Phi3Config(WindowedFamilyConfig):
    """Schema of the mini and medium models of Phi-3, Phi-3.5 and Phi-4."""

    architecture = "Phi3ForCausalLM"
    model_types = ("phi3",)
    implementation = "phi3:Phi3ForCausalLM"

    max_position_embeddings: Count = 4096
    original_max_position_embeddings: Index = 4096
    partial_rotary_factor: Number = 1.0
    rms_norm_eps: Number = 1e-5
    eos_token_id: Any = 32000
    full_attn_mod: Literal[1] = 1
    interpolate_factor: Literal[1] = 1


class Phi3VConfig(Phi3Config):
    """Schema of the language model of Phi-3 and Phi-3.5 vision."""

    architecture = "Phi3VForCausalLM"
    model_types = ("phi3_v",)
    harmless = words("embd_layer img_processor")
    skipped = ("model.vision_embed_tokens.",)


class PhimoeConfig(WindowedFamilyConfig, kw_only=True):
    """Phi-3.5-MoE: LayerNorm, and two experts per token, chosen by SparseMixer."""

    architecture = "PhimoeForCausalLM"
    other_architectures = ("PhiMoEForCausalLM",)
    model_types = ("phimoe",)
    implementation = "phimoe:PhimoeForCausalLM"
    harmless = ROUTER_KEYS | words("input_jitter_noise")
    """Keys that only concern training."""
    extra_keys = ("router_jitter_noise",)

    max_position_embeddings: Count = 131072
    num_key_value_heads: Count | None = 8
    rms_norm_eps: Number = 1e-5
    rope_theta: Number = 1000000.0
    eos_token_id: Any = 2
    attention_bias: bool = False
    lm_head_bias: Yes
    num_local_experts: Count = 16
    num_experts_per_tok: Literal[2] = 2
    router_jitter_noise: Number = 0.01
    """Fraction of the best score; experts whose scores are lower by more than twice this fraction
    are ignored, in inference too."""

    def derive(self) -> None:
        """Converts `short_mscale` of LongRoPE to the factor applied to cosines and sines for
        sequences within the original length."""
        key = "rope_scaling" if self.rope_scaling else "rope_parameters"
        table = dict(getattr(self, key) or {})
        short, long = table.pop("short_mscale", None), table.pop("long_mscale", None)
        if short is None and long is None:
            return
        if table.get("rope_type", table.get("type")) != "longrope" or "attention_factor" in table:
            raise ValueError(
                f"{key}.short_mscale {short} and long_mscale {long} in config.json are not "
                "supported: they require rope_type longrope and no attention_factor; use another "
                "checkpoint"
            )
        setattr(self, key, {**table, "attention_factor": short})

    def moe(self) -> MoeConfig:
        """Experts in all layers; the model class implements their selection."""
        return MoeConfig(
            num_experts=self.num_local_experts,
            top_k=self.num_experts_per_tok,
            intermediate_size=self.intermediate_size,
            normalize=False,
        )


FAMILIES = (PhiConfig, Phi3Config, Phi3VConfig, PhimoeConfig)
