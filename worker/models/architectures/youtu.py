"""Youtu-LLM (huggingface.co/tencent): multi-head latent attention without experts.

Schema: `config/vendors/tencent.py`.
"""

from __future__ import annotations

from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.deepseek import LatentAttention
from worker.models.architectures.llama import PreNormLayer
from worker.models.layers.attention import GatedMLP


class YoutuForCausalLM(DecoderModel):
    """Youtu-LLM: DeepSeek's attention, and an MLP in all layers."""

    def build_layer(self, index: int) -> PreNormLayer:
        """Builds a layer; all layers have the same structure."""
        mlp = GatedMLP(self.config, self.options)
        return PreNormLayer(self, LatentAttention.of(self, index), mlp, mixer_name="self_attn")
