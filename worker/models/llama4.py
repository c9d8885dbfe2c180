"""Llama 4 (huggingface.co/meta-llama): layers that see their chunk and rotate, and layers that see
everything and do not; experts that read what a router scales, beside one that every token takes."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import torch

from worker.models.checkpoint import positive_integer
from worker.models.config import ModelConfig
from worker.models.decoder import DecoderModel, FeedForward
from worker.models.layers import AttentionTraits, GatedMLP
from worker.models.linear_method import LayerOptions
from worker.models.llama import LlamaLayer
from worker.models.moe import MoeMLP, MoeNames, StackedNames


class Llama4Moe(MoeMLP):
    """An expert gets its tokens times the sigmoid of their scores, and what it yields counts fully.

    Args:
        config: of the model.
        options: of the rank.
    """

    weighs_inputs: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, options: LayerOptions) -> None:
        stacked = StackedNames(is_transposed=True) if config.quantization is None else None
        names = MoeNames(router="router", shared="shared_expert", stacked=stacked)
        super().__init__(config, options, names)
        self._routing = replace(self._routing, scoring="sigmoid of chosen")


class Llama4ForCausalLM(DecoderModel):
    """Heads of queries and keys are normalised after they rotate, by no weight. Queries of layers
    where nothing rotates grow with their positions."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Builds a layer with rotation or without, with experts or a single MLP."""
        assert self.config.rotating is not None, "its entry in the table of families tells"
        rotates = self.config.rotating[index]
        traits = AttentionTraits(
            rotates=rotates,
            is_interleaved=rotates,
            has_unit_heads=rotates and self.own("use_qk_norm"),
            query_scale=None if rotates else self._query_scale,
        )
        return LlamaLayer(
            self, index, self._build_mlp(index), traits=traits, mlp_name="feed_forward"
        )

    def _build_mlp(self, index: int) -> FeedForward:
        moe = self.config.moe
        assert moe is not None, "the architecture has experts"
        if index in moe.dense_layers:
            return GatedMLP(self.config, self.options, int(self.own("intermediate_size_mlp")))
        return Llama4Moe(self.config, self.options)

    @cached_property
    def _query_scale(self) -> torch.Tensor | None:
        """1 + scale * ln(1 + floor((position + 1) / length)), by position."""
        if not self.own("attn_temperature_tuning"):
            return None
        positions = torch.arange(len(self.cos_sin), dtype=torch.float32)
        turns = torch.floor(
            (positions + 1) / positive_integer(self.config.own or {}, "floor_scale")
        )
        scale = float(self.own("attn_scale"))
        return (1 + scale * torch.log1p(turns)).to(self.options.device)
