"""Phi-3 and Phi-4 (huggingface.co/microsoft): Llama by other names, part of whose heads rotates."""

from __future__ import annotations

from worker.models.decoder import DecoderModel
from worker.models.layers import AttentionNames, AttentionTraits, GatedMLP
from worker.models.llama import LlamaLayer

_NAMES = AttentionNames(q="qkv_proj", k="qkv_proj", v="qkv_proj", is_fused=True)


class Phi3ForCausalLM(DecoderModel):
    """q, k and v are one tensor of a checkpoint, and so are gate and up."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Every layer is alike."""
        mlp = GatedMLP(self.config, self.options, is_fused=True)
        return LlamaLayer(self, index, mlp, traits=AttentionTraits(names=_NAMES))
