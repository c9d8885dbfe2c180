"""Schema of Helium (huggingface.co/kyutai). Does not import torch."""

from __future__ import annotations

from typing import Any

from worker.models.config.family import Biases, FamilyConfig
from worker.models.config.schema import Count, Number


class HeliumConfig(FamilyConfig):
    """Helium: Llama with interleaved rotary embedding."""

    architecture = "HeliumForCausalLM"
    model_types = ("helium",)
    implementation = "ernie4_5:Ernie45ForCausalLM"

    max_position_embeddings: Count = 4096
    num_key_value_heads: Count | None = 20
    head_dim: Count | None = 128
    rms_norm_eps: Number = 1e-8
    rope_theta: Number = 100000.0
    eos_token_id: Any = 2
    attention_bias: bool = False
    mlp_bias: bool = False

    def biases(self) -> Biases:
        """Biases as set in config.json; the output projection of attention has none."""
        return Biases(qkv=self.attention_bias, mlp=self.mlp_bias)


FAMILIES = (HeliumConfig,)
