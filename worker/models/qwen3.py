"""Qwen3, dense."""

from __future__ import annotations

from worker.models.decoder import DecoderModel, FeedForward
from worker.models.layers import Attention, GatedMLP


class Qwen3ForCausalLM(DecoderModel):
    """Each head of q and k is normalised before it rotates."""

    def build_attention(self, layer_index: int) -> Attention:
        """Normalised q and k; biases follow `attention_bias`."""
        return Attention(
            self.config,
            self.options,
            layer_index=layer_index,
            cos_sin=self.cos_sin,
            qkv_bias=self.config.attention_bias,
            output_bias=self.config.attention_bias,
            qk_norm=True,
        )

    def build_mlp(self, layer_index: int) -> FeedForward:
        """SiLU-gated, no biases."""
        return GatedMLP(self.config, self.options, bias=False)
