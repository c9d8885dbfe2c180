"""Falcon (huggingface.co/tiiuae). Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from worker.models.config.family import Biases, FamilyConfig
from worker.models.config.schema import Count, Index, Number, Yes, only, words


class FalconConfig(FamilyConfig):
    """Falcon 7B: one KV head, and attention and MLP in parallel behind one LayerNorm."""

    architecture = "FalconForCausalLM"
    model_types = ("falcon",)
    implementation = "falcon:FalconForCausalLM"
    harmless = words("num_kv_heads apply_residual_connection_post_layernorm")

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
        """Sets sizes that follow from others."""
        self.num_key_value_heads = 1
        self.intermediate_size = self.ffn_hidden_size or 4 * self.hidden_size
        self.rms_norm_eps = self.layer_norm_epsilon

    def biases(self) -> Biases:
        """Biases of all projections."""
        return Biases(self.bias, self.bias, self.bias)


FAMILIES = (FalconConfig,)
