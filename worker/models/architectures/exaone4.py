"""EXAONE 4 (huggingface.co/LGAI-EXAONE): OLMo 2's layers, with QK norm of each head.

Schema: `config/vendors/lg.py`.
"""

from __future__ import annotations

from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.olmo import PostNormLayer
from worker.models.layers.attention import AttentionTraits, GatedMLP


class Exaone4ForCausalLM(DecoderModel):
    """EXAONE 4: models with sliding windows have no rotary embedding in full-attention layers."""

    def build_layer(self, index: int) -> PostNormLayer:
        """Builds a layer with rotary embedding, or, if others have windows, perhaps without."""
        rotates = self.extra("sliding_window") is None or self.config.windows[index] is not None
        mlp = GatedMLP(self.config, self.options)
        return PostNormLayer(self, index, mlp, traits=AttentionTraits(rotates=rotates))
