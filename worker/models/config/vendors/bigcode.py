"""Schema of Starcoder 2 (huggingface.co/bigcode). Does not import torch."""

from __future__ import annotations

from typing import Any, Literal

from worker.models.config.family import Biases, WindowedFamilyConfig
from worker.models.config.schema import Count, Number, Yes, words


class Starcoder2Config(WindowedFamilyConfig):
    """Starcoder 2: LayerNorm, biases in all projections, and an ungated MLP."""

    architecture = "Starcoder2ForCausalLM"
    model_types = ("starcoder2",)
    implementation = "starcoder2:Starcoder2ForCausalLM"
    harmless = words(
        """
        activation_function layer_norm_epsilon residual_dropout embedding_dropout
        attention_softmax_in_fp32 scale_attention_softmax_in_fp32
        """
    )

    max_position_embeddings: Count = 4096
    num_key_value_heads: Count | None = 2
    norm_epsilon: Number = 1e-5
    tie_word_embeddings: bool = True
    eos_token_id: Any = 50256
    use_bias: bool = True
    hidden_act: Literal["gelu_pytorch_tanh", "gelu_new"] = "gelu_pytorch_tanh"
    mlp_type: Literal["default"] = "default"
    norm_type: Literal["layer_norm"] = "layer_norm"
    scale_attn_weights: Yes = True

    def derive(self) -> None:
        """Sets the epsilon of norms."""
        self.rms_norm_eps = self.norm_epsilon

    def biases(self) -> Biases:
        """Biases of all projections."""
        return Biases(self.use_bias, self.use_bias, self.use_bias)


FAMILIES = (Starcoder2Config,)
