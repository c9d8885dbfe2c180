"""Ministral 3 and Devstral 2 (huggingface.co/mistralai): Llama with queries scaled by position.

Schema: `config/vendors/mistral.py`.
"""

from __future__ import annotations

from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.llama import LlamaLayer
from worker.models.layers.attention import AttentionTraits, GatedMLP


class Ministral3ForCausalLM(DecoderModel):
    """Llama whose queries are multiplied by 1 + beta * ln(1 + floor(position / length)), where beta
    is `llama_4_scaling_beta` and length is the context length of pretraining."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Builds a layer; all layers have the same structure."""
        mlp = GatedMLP(self.config, self.options)
        return LlamaLayer(self, index, mlp, traits=AttentionTraits(query_scale=self.query_scale))
