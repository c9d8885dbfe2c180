"""Ministral 3 and Devstral 2 (huggingface.co/mistralai): Llama whose queries grow."""

from __future__ import annotations

from functools import cached_property

import torch

from worker.models.decoder import DecoderModel
from worker.models.layers import AttentionTraits, GatedMLP
from worker.models.llama import LlamaLayer
from worker.models.rope import query_scales


class Ministral3ForCausalLM(DecoderModel):
    """Beyond the length that the model was first trained on, queries are multiplied by
    1 + beta * ln(1 + floor(position / length)); beta is `llama_4_scaling_beta`."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Every layer is alike."""
        mlp = GatedMLP(self.config, self.options)
        return LlamaLayer(self, index, mlp, traits=AttentionTraits(query_scale=self._query_scale))

    @cached_property
    def _query_scale(self) -> torch.Tensor | None:
        return query_scales(self.config.rope, len(self.cos_sin), self.options.device)
