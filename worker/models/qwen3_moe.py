"""Qwen3 with mixtures of experts."""

from __future__ import annotations

from worker.models.decoder import FeedForward
from worker.models.moe import MoeMLP
from worker.models.qwen3 import Qwen3ForCausalLM


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Qwen3's attention; most layers have experts in place of the MLP."""

    def build_mlp(self, layer_index: int) -> FeedForward:
        """Experts, or a single MLP in the layers that config.json names."""
        moe = self.config.moe
        assert moe is not None, "the architecture has experts"
        if layer_index in moe.dense_layers:
            return super().build_mlp(layer_index)
        return MoeMLP(self.config, moe, self.options)
