"""Phi (huggingface.co/microsoft). Imports no torch."""

from __future__ import annotations

from typing import Any, Literal

from worker.models.config.family import Biases, FamilyConfig, WindowedFamilyConfig, rotary_size
from worker.models.config.schema import Count, Index, Number, words


class PhiConfig(FamilyConfig):
    """Phi 1 to 2."""

    architecture = "PhiForCausalLM"
    model_types = ("phi",)
    implementation = "phi:PhiForCausalLM"

    max_position_embeddings: Count = 2048
    layer_norm_eps: Number = 1e-5
    partial_rotary_factor: Number = 0.5
    rotary_dim: Count | None = None
    eos_token_id: Any = 2
    hidden_act: Literal["gelu_pytorch_tanh", "gelu_new"] = "gelu_new"

    def derive(self) -> None:
        """Sets the epsilon of norms."""
        self.rms_norm_eps = self.layer_norm_eps

    def rotary_size(self) -> int:
        """Number of leading dimensions of a head with rotary embedding."""
        return rotary_size(self, self.rotary_dim)

    def biases(self) -> Biases:
        """Biases of all projections."""
        return Biases(True, True, True)


class Phi3Config(WindowedFamilyConfig):
    """Phi-3, Phi-3.5 and Phi-4, mini and medium."""

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
    """The language model of Phi-3 and Phi-3.5 vision."""

    architecture = "Phi3VForCausalLM"
    model_types = ("phi3_v",)
    harmless = words("embd_layer img_processor")
    skipped = ("model.vision_embed_tokens.",)


FAMILIES = (PhiConfig, Phi3Config, Phi3VConfig)
