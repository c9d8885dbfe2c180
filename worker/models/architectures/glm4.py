"""GLM-4 (huggingface.co/zai-org): the first release, and GLM-4-0414.

Schema: `config/vendors/zai.py`.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.llama import LlamaLayer
from worker.models.layers.attention import FUSED_NAMES, AttentionTraits, GatedMLP


class SandwichLayer(LlamaLayer):
    """A layer with norms before and after each block: x + norm(attention(norm(x))), then
    x + norm(mlp(norm(x)))."""

    norm_names: ClassVar[tuple[str, ...]] = (
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    )

    def after_mixer(
        self, hidden: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalizes the attention output, then runs the MLP between two norms; arguments and
        result as in PreNormLayer."""
        _, after_attention, before_mlp, after_mlp = self.norms
        hidden, residual = self.normed_feed_forward(before_mlp, hidden, residual, after_attention)
        return after_mlp.forward(hidden), residual


class Glm4ForCausalLM(DecoderModel):
    """GLM-4-0414: norms before and after each block, interleaved rotary embedding in half of each
    head, and fused gate and up projections."""

    def build_layer(self, index: int) -> SandwichLayer:
        """Builds a layer; all layers have the same structure."""
        mlp = GatedMLP(self.config, self.options, names=FUSED_NAMES)
        return SandwichLayer(self, index, mlp, traits=AttentionTraits(is_interleaved=True))


class GlmForCausalLM(DecoderModel):
    """GLM-4 as first released: like GLM-4-0414, with norms only before each block."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Builds a layer; all layers have the same structure."""
        mlp = GatedMLP(self.config, self.options, names=FUSED_NAMES)
        return LlamaLayer(self, index, mlp, traits=AttentionTraits(is_interleaved=True))
