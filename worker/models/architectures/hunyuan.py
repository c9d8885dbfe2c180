"""Hunyuan's dense models (huggingface.co/tencent): QK norm comes after rotary embedding.

Schema: `config/vendors/tencent.py`.
"""

from __future__ import annotations

from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.llama import LlamaLayer
from worker.models.layers.attention import AttentionNames, AttentionTraits, GatedMLP

_NAMES = AttentionNames(q_norm="query_layernorm", k_norm="key_layernorm")


class HunYuanDenseV1ForCausalLM(DecoderModel):
    """Llama with QK norm after rotary embedding; the rotary base grows with `alpha`."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Builds a layer; all layers have the same structure."""
        traits = AttentionTraits(names=_NAMES, rotates_first=True)
        return LlamaLayer(self, index, GatedMLP(self.config, self.options), traits=traits)
