"""Schema of Seed-OSS (huggingface.co/ByteDance-Seed). Does not import torch."""

from __future__ import annotations

from typing import Any

from worker.models.config.family import Biases, FamilyConfig
from worker.models.config.schema import Count


class SeedOssConfig(FamilyConfig):
    """Seed-OSS: Llama with biases of q, k and v."""

    architecture = "SeedOssForCausalLM"
    model_types = ("seed_oss",)
    implementation = "llama:LlamaForCausalLM"
    harmless = frozenset({"residual_dropout"})

    max_position_embeddings: Count = 524288
    num_key_value_heads: Count | None = 8
    head_dim: Count | None = 128
    eos_token_id: Any = 2
    attention_bias: bool = True
    attention_out_bias: bool = False
    mlp_bias: bool = False

    def biases(self) -> Biases:
        """Biases as set in config.json."""
        return Biases(self.attention_bias, self.attention_out_bias, self.mlp_bias)


FAMILIES = (SeedOssConfig,)
