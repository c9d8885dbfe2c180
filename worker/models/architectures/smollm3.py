"""SmolLM3 (huggingface.co/HuggingFaceTB): Llama with layers without rotary embedding (NoPE).

Schema: `config/vendors/huggingface.py`.
"""

from __future__ import annotations

from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.llama import LlamaLayer
from worker.models.layers.attention import AttentionTraits, GatedMLP


class SmolLM3ForCausalLM(DecoderModel):
    """SmolLM3. `no_rope_layers` has a 1 for layers with rotary embedding and a 0 for others; if it
    is missing, every `no_rope_layer_interval`-th layer has none."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Builds a layer with rotary embedding, or without."""
        assert self.config.rotating is not None, "the family's schema sets it"
        mlp = GatedMLP(self.config, self.options)
        return LlamaLayer(
            self, index, mlp, traits=AttentionTraits(rotates=self.config.rotating[index])
        )
