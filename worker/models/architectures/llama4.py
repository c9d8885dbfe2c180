"""Llama 4 (huggingface.co/meta-llama): chunked attention with rotary embedding in some layers, full
attention without rotary embedding in the others; routed experts and a shared expert.

Schema: `config/vendors/meta.py`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import torch

from worker.models.architectures.decoder import DecoderModel, FeedForward
from worker.models.architectures.llama import LlamaLayer
from worker.models.config.model_config import ModelConfig
from worker.models.layers.attention import AttentionTraits, GatedMLP
from worker.models.layers.linear_method import LayerOptions
from worker.models.layers.moe import MoeMLP, MoeNames, StackedNames


class Llama4Moe(MoeMLP):
    """Experts whose inputs, not outputs, are multiplied by the router's weights, which are the
    sigmoids of the scores.

    Args:
        config: the model's configuration.
        options: options of the model's layers.
    """

    weighs_inputs: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, options: LayerOptions) -> None:
        stacked = StackedNames(is_transposed=True) if config.quantization is None else None
        names = MoeNames(router="router", shared="shared_expert", stacked=stacked)
        super().__init__(config, options, names)
        self._routing = replace(self._routing, scoring="sigmoid of chosen")


class Llama4ForCausalLM(DecoderModel):
    """Llama 4. Layers with rotary embedding may normalize each head of q and k after the rotation,
    without weights. The other layers may scale queries by position."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Builds a layer with or without rotary embedding, with experts or an MLP."""
        assert self.config.rotating is not None, "the family's schema sets it"
        rotates = self.config.rotating[index]
        traits = AttentionTraits(
            rotates=rotates,
            is_interleaved=rotates,
            has_unit_heads=rotates and self.extra("use_qk_norm"),
            query_scale=None if rotates else self._query_scale,
        )
        return LlamaLayer(
            self, index, self._build_mlp(index), traits=traits, mlp_name="feed_forward"
        )

    def _build_mlp(self, index: int) -> FeedForward:
        moe = self.config.moe
        assert moe is not None, "the architecture has experts"
        if index in moe.dense_layers:
            return GatedMLP(self.config, self.options, int(self.extra("intermediate_size_mlp")))
        return Llama4Moe(self.config, self.options)

    @cached_property
    def _query_scale(self) -> torch.Tensor | None:
        """Query scale by position, fp32 [positions]:
        1 + attn_scale * ln(1 + floor((position + 1) / floor_scale)); None if queries are not
        scaled."""
        if not self.extra("attn_temperature_tuning"):
            return None
        positions = torch.arange(len(self.cos_sin), dtype=torch.float32)
        turns = torch.floor((positions + 1) / int(self.extra("floor_scale")))
        scale = float(self.extra("attn_scale"))
        return (1 + scale * torch.log1p(turns)).to(self.options.device)
