"""Mistral, up to the width of its sliding window."""

from __future__ import annotations

from worker.models.decoder import DecoderModel, FeedForward
from worker.models.layers import Attention, GatedMLP


class MistralForCausalLM(DecoderModel):
    """Llama's shape without any bias."""

    def build_attention(self, layer_index: int) -> Attention:
        """No biases."""
        return Attention(
            self.config,
            self.options,
            layer_index=layer_index,
            cos_sin=self.cos_sin,
            qkv_bias=False,
            output_bias=False,
            qk_norm=False,
        )

    def build_mlp(self, layer_index: int) -> FeedForward:
        """SiLU-gated, no biases."""
        return GatedMLP(self.config, self.options, bias=False)
