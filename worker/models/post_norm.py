"""OLMo 2 and 3, FlexOlmo (huggingface.co/allenai), EXAONE 4 (huggingface.co/LGAI-EXAONE): norms
stand behind the blocks, none before them."""

from __future__ import annotations

from typing import ClassVar

import torch

from worker.models.context import ForwardContext
from worker.models.decoder import DecoderModel
from worker.models.layers import AttentionTraits, GatedMLP
from worker.models.llama import LlamaLayer
from worker.models.norms import RMSNorm
from worker.models.qwen3_moe import Qwen3MoeForCausalLM


class PostNormLayer(LlamaLayer):
    """x + norm(attention(x)), then x + norm(mlp(x))."""

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
        read: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        """The sum, to which nothing is left to be added; where no layer follows, that of the tokens
        `read` [S]."""
        assert residual is None, "as the layer before leaves it"
        after_attention, after_mlp = self.norms
        assert isinstance(after_attention, RMSNorm), "what build_norm makes"
        assert isinstance(after_mlp, RMSNorm), "what build_norm makes"
        attended = self.attention.forward(hidden, positions, ctx, read)
        if read is not None:
            hidden = hidden.index_select(0, read)
            if not len(read):
                return hidden, None
        hidden = after_attention.add_to(hidden, attended)
        return after_mlp.add_to(hidden, self.mlp.forward(hidden)), None


class Olmo2ForCausalLM(DecoderModel):
    """Queries and keys are normalised over all heads together. OLMo 3 is OLMo 2 with windows, and
    layers that have one rotate by a table of their own."""

    def build_layer(self, index: int) -> PostNormLayer:
        """Every layer is alike, windows and tables apart."""
        mlp = GatedMLP(self.config, self.options)
        return PostNormLayer(self, index, mlp, traits=AttentionTraits(has_wide_norms=True))


class FlexOlmoForCausalLM(Qwen3MoeForCausalLM):
    """OLMo 2 with experts in all layers."""

    def build_layer(self, index: int) -> PostNormLayer:
        """Every layer is alike."""
        traits = AttentionTraits(has_wide_norms=True)
        return PostNormLayer(self, index, self.build_mlp(index), traits=traits)


class Exaone4ForCausalLM(DecoderModel):
    """EXAONE 4: where there is a window, nothing rotates in layers that see everything."""

    def build_layer(self, index: int) -> PostNormLayer:
        """Builds a layer with a window and rotation, or without both."""
        rotates = self.own("sliding_window") is None or self.config.windows[index] is not None
        mlp = GatedMLP(self.config, self.options)
        return PostNormLayer(self, index, mlp, traits=AttentionTraits(rotates=rotates))
