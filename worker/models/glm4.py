"""GLM-4 (huggingface.co/zai-org): in that of 0414 norms stand before and behind each block."""

from __future__ import annotations

from typing import ClassVar

import torch

from worker.models.decoder import DecoderModel
from worker.models.layers import AttentionTraits, GatedMLP
from worker.models.llama import LlamaLayer


class SandwichLayer(LlamaLayer):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    norm_names: ClassVar[tuple[str, ...]] = (
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    )

    def after_mixer(
        self, hidden: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See the base class."""
        _, after_attention, before_mlp, after_mlp = self.norms
        hidden, residual = before_mlp.forward_add(hidden, residual, after_attention)
        return after_mlp.forward(self.mlp.forward(hidden)), residual


class Glm4ForCausalLM(DecoderModel):
    """Half of each head rotates, neighbouring dimensions together; gate and up are one tensor."""

    def build_layer(self, index: int) -> SandwichLayer:
        """Every layer is alike."""
        mlp = GatedMLP(self.config, self.options, is_fused=True)
        return SandwichLayer(self, index, mlp, traits=AttentionTraits(is_interleaved=True))


class GlmForCausalLM(DecoderModel):
    """The same without norms behind blocks, as GLM-4 was first released."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Every layer is alike."""
        mlp = GatedMLP(self.config, self.options, is_fused=True)
        return LlamaLayer(self, index, mlp, traits=AttentionTraits(is_interleaved=True))
