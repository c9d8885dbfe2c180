"""SmolLM3 (huggingface.co/HuggingFaceTB): Llama, in some of whose layers nothing rotates."""

from __future__ import annotations

from worker.models.decoder import DecoderModel
from worker.models.layers import AttentionTraits, GatedMLP
from worker.models.llama import LlamaLayer


class SmolLM3ForCausalLM(DecoderModel):
    """`no_rope_layers` says 1 of a layer that rotates, 0 of one that does not; where it is missing,
    each `no_rope_layer_interval`-th does not."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Builds a layer with rotation or without."""
        assert self.config.rotating is not None, "its entry in the table of families tells"
        mlp = GatedMLP(self.config, self.options)
        return LlamaLayer(
            self, index, mlp, traits=AttentionTraits(rotates=self.config.rotating[index])
        )
