"""Qwen2 and Qwen3 with mixtures of experts, and SDAR with them."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

from worker.models.decoder import DecoderModel, FeedForward
from worker.models.layers import GatedMLP
from worker.models.llama import LlamaLayer, PreNormLayer
from worker.models.moe import MoeMLP, MoeNames, as_stored


class Qwen3MoeForCausalLM(DecoderModel):
    """Llama's layers, most of which have experts in place of the MLP."""

    moe_names: ClassVar[MoeNames] = MoeNames()
    """Names of the experts' parts in a checkpoint."""

    def build_layer(self, index: int) -> PreNormLayer:
        """Experts, or a single MLP in the layers that config.json names."""
        return LlamaLayer(self, index, self.build_mlp(index))

    def build_mlp(self, index: int) -> FeedForward:
        """Builds the part of a layer that follows attention."""
        moe = self.config.moe
        assert moe is not None, "the architecture has experts"
        if index in moe.dense_layers:
            return GatedMLP(self.config, self.options)
        return MoeMLP(self.config, self.options, self._stored_names)

    @cached_property
    def _stored_names(self) -> MoeNames:
        """Experts may be stacked, too."""
        return as_stored(self.moe_names, self.config)


class Qwen2MoeForCausalLM(Qwen3MoeForCausalLM):
    """Every token takes one more MLP, as much as a gate says."""

    moe_names: ClassVar[MoeNames] = MoeNames(
        shared="shared_expert", shared_gate="shared_expert_gate"
    )
