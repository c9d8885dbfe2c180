"""Schema of StableLM 2 (huggingface.co/stabilityai). Does not import torch."""

from __future__ import annotations

from typing import Any

from worker.models.config.family import Biases, FamilyConfig
from worker.models.config.schema import Count, Number


class StableLmConfig(FamilyConfig):
    """StableLM 2: LayerNorm, and rotary embedding in a quarter of each head."""

    architecture = "StableLmForCausalLM"
    model_types = ("stablelm",)
    implementation = "stablelm:StableLmForCausalLM"

    max_position_embeddings: Count = 4096
    num_key_value_heads: Count | None = 32
    layer_norm_eps: Number = 1e-5
    partial_rotary_factor: Number = 0.25
    use_qkv_bias: bool = False
    eos_token_id: Any = 0

    def derive(self) -> None:
        """Sets the epsilon of norms."""
        self.rms_norm_eps = self.layer_norm_eps

    def biases(self) -> Biases:
        """Biases of q, k and v."""
        return Biases(qkv=self.use_qkv_bias)


FAMILIES = (StableLmConfig,)
