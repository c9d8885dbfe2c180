"""OLMo 2 and 3, FlexOlmo and OLMoE (huggingface.co/allenai): QK norm over all heads together; norms
after the blocks, and none before them, except in OLMoE.

Schema: `config/vendors/ai2.py`.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.llama import LlamaLayer
from worker.models.architectures.qwen3_moe import Qwen3MoeForCausalLM
from worker.models.layers.attention import AttentionTraits, GatedMLP
from worker.models.layers.context import ForwardContext
from worker.models.layers.norms import RMSNorm


class PostNormLayer(LlamaLayer):
    """A post-norm layer: x + norm(attention(x)), then x + norm(mlp(x))."""

    norm_names: ClassVar[tuple[str, ...]] = (
        "post_attention_layernorm",
        "post_feedforward_layernorm",
    )

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        ctx: ForwardContext,
        logits_indices: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        """The residual after attention and MLP, [T, hidden] (in the last layer, [S, hidden] for the
        tokens in `logits_indices`), and None, since nothing remains to be added."""
        assert residual is None, "the previous layer returns no residual"
        after_attention, after_mlp = self.norms
        assert isinstance(after_attention, RMSNorm), "build_norm returns an RMSNorm"
        assert isinstance(after_mlp, RMSNorm), "build_norm returns an RMSNorm"
        attended = self.attention.forward(hidden, positions, ctx, logits_indices)
        if logits_indices is not None:
            hidden = hidden.index_select(0, logits_indices)
            if not len(logits_indices):
                return hidden, None
        hidden = after_attention.add_to(hidden, attended)
        return after_mlp.add_to(hidden, self.mlp.forward(hidden)), None


class Olmo2ForCausalLM(DecoderModel):
    """OLMo 2 and 3: QK norm over all heads together. OLMo 3 adds sliding windows, with a separate
    rotary embedding."""

    def build_layer(self, index: int) -> PostNormLayer:
        """Builds a layer; layers differ only in windows and rotary tables."""
        mlp = GatedMLP(self.config, self.options)
        return PostNormLayer(self, index, mlp, traits=AttentionTraits(has_wide_norms=True))


class FlexOlmoForCausalLM(Qwen3MoeForCausalLM):
    """OLMo 2 with experts in all layers."""

    def build_layer(self, index: int) -> PostNormLayer:
        """Builds a layer; all layers have the same structure."""
        traits = AttentionTraits(has_wide_norms=True)
        return PostNormLayer(self, index, self.build_mlp(index), traits=traits)


class OlmoeForCausalLM(Qwen3MoeForCausalLM):
    """OLMoE: norms before the blocks, and experts in all layers."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Builds a layer; all layers have the same structure."""
        traits = AttentionTraits(has_wide_norms=True)
        return LlamaLayer(self, index, self.build_mlp(index), traits=traits)
