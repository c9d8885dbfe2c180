"""Llama 2, Llama 3 and the many models of the same shape."""

from __future__ import annotations

from worker.models.decoder import DecoderModel, FeedForward
from worker.models.layers import Attention, GatedMLP


class LlamaForCausalLM(DecoderModel):
    """Grouped-query attention; biases only where the configuration asks for them."""

    def build_attention(self, layer_index: int) -> Attention:
        """Biases follow `attention_bias`."""
        return Attention(
            self.config,
            self.options,
            layer_index=layer_index,
            cos_sin=self.cos_sin,
            qkv_bias=self.config.attention_bias,
            output_bias=self.config.attention_bias,
            qk_norm=False,
        )

    def build_mlp(self, layer_index: int) -> FeedForward:
        """SiLU-gated; biases follow `mlp_bias`."""
        return GatedMLP(self.config, self.options, bias=self.config.mlp_bias)
