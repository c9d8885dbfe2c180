"""Arcee's AFM (huggingface.co/arcee-ai): Llama whose MLP has no gate."""

from __future__ import annotations

from kernels import squared_relu
from worker.models.decoder import DecoderModel
from worker.models.layers import MLP
from worker.models.llama import LlamaLayer


class ArceeForCausalLM(DecoderModel):
    """The MLP squares what is positive."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Every layer is alike."""
        return LlamaLayer(self, index, MLP(self.config, self.options, squared_relu))
