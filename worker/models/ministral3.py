"""Ministral 3 and Devstral 2 (huggingface.co/mistralai): Llama whose queries grow."""

from __future__ import annotations

from worker.models.decoder import DecoderModel
from worker.models.layers import AttentionTraits, GatedMLP
from worker.models.llama import LlamaLayer


class Ministral3ForCausalLM(DecoderModel):
    """Beyond the length that the model was first trained on, queries are multiplied by
    1 + beta * ln(1 + floor(position / length)); beta is `llama_4_scaling_beta`."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Every layer is alike."""
        mlp = GatedMLP(self.config, self.options)
        return LlamaLayer(self, index, mlp, traits=AttentionTraits(query_scale=self.query_scale))
