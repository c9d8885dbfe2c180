"""ERNIE 4.5, dense (huggingface.co/baidu): Llama whose neighbouring dimensions rotate together."""

from __future__ import annotations

from worker.models.decoder import DecoderModel
from worker.models.layers import AttentionTraits, GatedMLP
from worker.models.llama import LlamaLayer


class Ernie45ForCausalLM(DecoderModel):
    """A checkpoint has Llama's very names, so nothing but the family tells them apart."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Every layer is alike."""
        mlp = GatedMLP(self.config, self.options)
        return LlamaLayer(self, index, mlp, traits=AttentionTraits(is_interleaved=True))
