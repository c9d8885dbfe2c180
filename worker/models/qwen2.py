"""Qwen2 and Qwen2.5."""

from __future__ import annotations

from worker.models.decoder import DecoderModel, FeedForward
from worker.models.layers import Attention, GatedMLP


class Qwen2ForCausalLM(DecoderModel):
    """Llama's shape with biases in the q, k and v projections."""

    def build_attention(self, layer_index: int) -> Attention:
        """Biases in q, k and v."""
        return Attention(
            self.config,
            self.options,
            layer_index=layer_index,
            cos_sin=self.cos_sin,
            qkv_bias=True,
            output_bias=False,
            qk_norm=False,
        )

    def build_mlp(self, layer_index: int) -> FeedForward:
        """SiLU-gated, no biases."""
        return GatedMLP(self.config, self.options, bias=False)
