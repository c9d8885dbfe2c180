"""SmolLM3 (huggingface.co/HuggingFaceTB): Llama in which some layers have no rotary embedding
(NoPE).

Schema: `config/vendors/huggingface.py`.
"""

from __future__ import annotations

from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.llama import LlamaLayer
from worker.models.layers.attention import AttentionTraits, GatedMLP


class SmolLM3ForCausalLM(DecoderModel):
    """SmolLM3. `no_rope_layers` is 1 for layers with rotary embedding and 0 for others; if it
    is missing, every `no_rope_layer_interval`-th layer has none."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Builds a layer with or without rotary embedding."""
        assert self.config.rotating is not None, "the family's schema sets it"
        mlp = GatedMLP(self.config, self.options)
        return LlamaLayer(
            self, index, mlp, traits=AttentionTraits(rotates=self.config.rotating[index])
        )
