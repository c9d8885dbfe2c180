"""OLMo Hybrid (huggingface.co/allenai): three out of four layers use linear attention (gated delta
net) with norms as in Llama; the others use OLMo 3's attention, possibly without rotary embedding.

Schema: `config/vendors/ai2.py`.
"""

from __future__ import annotations

import torch

from worker.models.architectures.decoder import DecoderLayer, DecoderModel
from worker.models.architectures.llama import PreNormLayer
from worker.models.architectures.olmo import PostNormLayer
from worker.models.architectures.qwen3_next import DeltaTraits, GatedDeltaNet
from worker.models.layers.attention import AttentionTraits, GatedMLP
from worker.models.layers.context import ForwardContext

_NORM_EPS = 1e-5
"""Epsilon of the linear attention's output norms, which config.json does not set."""


class OlmoLinearLayer(PreNormLayer):
    """A layer with linear attention, which adds its MLP's output to the residual itself, since the
    post-norm layers after it expect a complete residual."""

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        ctx: ForwardContext,
        logits_indices: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        """The residual after linear attention and MLP, [T, hidden] (in the last layer, [S, hidden]
        for the tokens in `logits_indices`), and None, since nothing remains to be added."""
        hidden, residual = super().forward(hidden, residual, positions, ctx, logits_indices)
        assert residual is not None, "PreNormLayer returns a residual"
        return hidden + residual, None


class OlmoHybridForCausalLM(DecoderModel):
    """OLMo Hybrid: linear attention with step sizes of up to 2, and full attention with QK norm
    over all heads together."""

    def build_layer(self, index: int) -> DecoderLayer:
        """Builds a layer with linear or full attention."""
        config, mlp = self.config, GatedMLP(self.config, self.options)
        if index in (config.linear_layers or ()):
            mixer = GatedDeltaNet(self, index, self._delta_traits())
            return OlmoLinearLayer(self, mixer, mlp, mixer_name="linear_attn")
        assert config.rotating is not None, "config.json specifies whether layers rotate"
        traits = AttentionTraits(has_wide_norms=True, rotates=config.rotating[index])
        return PostNormLayer(self, index, mlp, traits=traits)

    def _delta_traits(self) -> DeltaTraits:
        """Checkpoint names of the linear attention's tensors, and how it differs from other gated
        delta nets."""
        names = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")
        return DeltaTraits(
            projections=tuple(zip(names, "qkvzba", strict=True)),
            convolutions=(("q_conv1d", "q"), ("k_conv1d", "k"), ("v_conv1d", "v")),
            output="o_proj",
            norm="o_norm",
            norm_eps=_NORM_EPS,
            share_scale=2.0 if self.extra("linear_allow_neg_eigval") else 1.0,
        )
