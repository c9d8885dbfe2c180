"""Arcee's AFM (huggingface.co/arcee-ai): Llama with an ungated MLP.

Schema: `config/vendors/arcee.py`.
"""

from __future__ import annotations

from kernels import squared_relu
from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.llama import LlamaLayer
from worker.models.layers.attention import MLP


class ArceeForCausalLM(DecoderModel):
    """Llama with an MLP of two projections and a squared ReLU between them."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Builds a layer; all layers have the same structure."""
        return LlamaLayer(self, index, MLP(self.config, self.options, squared_relu))
