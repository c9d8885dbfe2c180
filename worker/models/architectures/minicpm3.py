"""MiniCPM3 (huggingface.co/openbmb): multi-head latent attention, and Granite's multipliers.

Schema: `config/vendors/openbmb.py`.
"""

from __future__ import annotations

from worker.models.architectures.deepseek import LatentAttention
from worker.models.architectures.granite import GraniteForCausalLM
from worker.models.architectures.llama import PreNormLayer
from worker.models.layers.attention import GatedMLP


class MiniCPM3ForCausalLM(GraniteForCausalLM):
    """MiniCPM3, with scales translated to Granite's and an MLP in all layers."""

    def build_layer(self, index: int) -> PreNormLayer:
        """Builds a layer; all layers have the same structure."""
        mlp = GatedMLP(self.config, self.options)
        return PreNormLayer(self, LatentAttention.of(self, index), mlp, mixer_name="self_attn")
