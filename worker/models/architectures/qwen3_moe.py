"""Mixture-of-experts variants of Qwen2, Qwen3 and SDAR (huggingface.co/Qwen, huggingface.co/JetLM),
DeepSeek MoE (huggingface.co/deepseek-ai) and Mellum 2 (huggingface.co/JetBrains).

Schemas: `qwen.py`, `deepseek.py` and `jetbrains.py` in `config/vendors/`.
"""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

from worker.models.architectures.decoder import DecoderModel, FeedForward
from worker.models.architectures.llama import LlamaLayer, PreNormLayer
from worker.models.layers.attention import GatedMLP
from worker.models.layers.moe import MoeMLP, MoeNames, as_stored


class Qwen3MoeForCausalLM(DecoderModel):
    """Llama's layers with experts in place of the MLP in most of them."""

    moe_names: ClassVar[MoeNames] = MoeNames()
    """Names of the MoE block's weights in a checkpoint."""

    def build_layer(self, index: int) -> PreNormLayer:
        """Builds a layer with experts or with an MLP, as specified in config.json."""
        return LlamaLayer(self, index, self.build_mlp(index))

    def build_mlp(self, index: int) -> FeedForward:
        """Builds the feed-forward block of a layer."""
        moe = self.config.moe
        assert moe is not None, "the architecture has experts"
        if index in moe.dense_layers:
            return GatedMLP(self.config, self.options)
        return MoeMLP(self.config, self.options, self._stored_names)

    @cached_property
    def _stored_names(self) -> MoeNames:
        """Names of the MoE block's weights in the checkpoint, which may stack all experts of a
        layer in two tensors."""
        return as_stored(self.moe_names, self.config)


class Qwen2MoeForCausalLM(Qwen3MoeForCausalLM):
    """Qwen2-MoE: experts and a shared expert with a gate."""

    moe_names: ClassVar[MoeNames] = MoeNames(
        shared="shared_expert", shared_gate="shared_expert_gate"
    )
