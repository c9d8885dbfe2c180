"""Phi-3 and Phi-4 (huggingface.co/microsoft): Llama with fused projections in checkpoints and
rotary embedding in part of each head.

Schema: `config/vendors/microsoft.py`.
"""

from __future__ import annotations

from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.llama import LlamaLayer
from worker.models.layers.attention import FUSED_NAMES, AttentionNames, AttentionTraits, GatedMLP

_NAMES = AttentionNames(q="qkv_proj", k="qkv_proj", v="qkv_proj", is_fused=True)


class Phi3ForCausalLM(DecoderModel):
    """Llama with a fused QKV tensor and a fused gate and up tensor in checkpoints."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Builds a layer; all layers have the same structure."""
        mlp = GatedMLP(self.config, self.options, names=FUSED_NAMES)
        return LlamaLayer(self, index, mlp, traits=AttentionTraits(names=_NAMES))
