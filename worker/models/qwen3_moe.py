"""Qwen3 with mixtures of experts, and SDAR with them."""

from __future__ import annotations

from worker.models.decoder import DecoderModel, FeedForward
from worker.models.layers import GatedMLP
from worker.models.llama import LlamaLayer
from worker.models.moe import MoeMLP


class Qwen3MoeForCausalLM(DecoderModel):
    """Llama's layers, most of which have experts in place of the MLP."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Experts, or a single MLP in the layers that config.json names."""
        return LlamaLayer(self, index, self.build_mlp(index))

    def build_mlp(self, index: int) -> FeedForward:
        """What follows attention in a layer."""
        moe = self.config.moe
        assert moe is not None, "the architecture has experts"
        if index in moe.dense_layers:
            return GatedMLP(self.config, self.options)
        return MoeMLP(self.config, moe, self.options)
