"""StableLM 2 (huggingface.co/stabilityai) and Orion (huggingface.co/OrionStarAI): LayerNorm with
bias before each block.

Schemas: `config/vendors/stability.py` and `config/vendors/orion.py`.
"""

from __future__ import annotations

from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.llama import LlamaLayer
from worker.models.layers.attention import GatedMLP
from worker.models.layers.norms import LayerNorm


class StableLmForCausalLM(DecoderModel):
    """StableLM 2 and Orion: Llama's blocks with LayerNorm. StableLM has rotary embedding in a
    quarter of each head."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Builds a layer; all layers have the same structure."""
        return LlamaLayer(self, index, GatedMLP(self.config, self.options))

    def build_norm(self) -> LayerNorm:
        """A LayerNorm with a bias."""
        config = self.config
        return LayerNorm(config.hidden_size, config.rms_norm_eps, self.options, has_bias=True)
