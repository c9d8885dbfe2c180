"""Hunyuan's dense models (huggingface.co/tencent): heads are normalised after they rotate."""

from __future__ import annotations

from worker.models.decoder import DecoderModel
from worker.models.layers import AttentionNames, AttentionTraits, GatedMLP
from worker.models.llama import LlamaLayer

_NAMES = AttentionNames(q_norm="query_layernorm", k_norm="key_layernorm")


class HunYuanDenseV1ForCausalLM(DecoderModel):
    """Llama but for these norms, and a base of the rotation that grows with `alpha`."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Every layer is alike."""
        traits = AttentionTraits(names=_NAMES, rotates_first=True)
        return LlamaLayer(self, index, GatedMLP(self.config, self.options), traits=traits)
