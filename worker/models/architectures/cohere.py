"""Command R, R7B and A, and Aya (huggingface.co/CohereLabs): attention and MLP are parallel blocks.

Schema: `config/vendors/cohere.py`.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from worker.models.architectures.decoder import DecoderModel, FeedForward
from worker.models.architectures.llama import LlamaLayer
from worker.models.layers.attention import AttentionTraits, GatedMLP
from worker.models.layers.context import ForwardContext
from worker.models.layers.moe import MoeMLP, MoeNames, as_stored
from worker.models.layers.norms import HiddenNorm, LayerNorm, RMSNorm


class ParallelLayer(LlamaLayer):
    """A layer with parallel blocks: x + attention(h) + mlp(h), where h = norm(x)."""

    norm_names: ClassVar[tuple[str, ...]] = ("input_layernorm",)

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        ctx: ForwardContext,
        logits_indices: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of the outputs of attention and MLP, and the residual to which it has yet to be
        added, [T, hidden] each; in the last layer, [S, hidden], for the tokens in `logits_indices`.
        """
        (norm,) = self.norms
        if residual is None:
            residual, hidden = hidden, norm.forward(hidden)
        else:
            hidden, residual = norm.forward_add(hidden, residual)
        attended = self.attention.forward(hidden, positions, ctx, logits_indices)
        if logits_indices is not None:
            residual = residual.index_select(0, logits_indices)
            hidden = hidden.index_select(0, logits_indices)
            if not len(logits_indices):
                return attended, residual
        return attended + self.mlp.forward(hidden), residual


class CohereForCausalLM(DecoderModel):
    """Parallel blocks and LayerNorm without bias; logits are multiplied by `logit_scale`."""

    def build_layer(self, index: int) -> ParallelLayer:
        """Builds a layer; all layers have the same structure."""
        return self._build_layer(index, rotates=True)

    def build_norm(self) -> HiddenNorm:
        """A LayerNorm without bias."""
        return LayerNorm(self.config.hidden_size, self.config.rms_norm_eps, self.options)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Computes fp32 logits [R, vocab_size] from the hidden states [R, hidden] of the rows to
        sample."""
        return super().compute_logits(hidden) * float(self.extra("logit_scale"))

    def build_mlp(self, index: int) -> FeedForward:
        """Builds the feed-forward block of a layer."""
        return GatedMLP(self.config, self.options)

    def _build_layer(self, index: int, *, rotates: bool) -> ParallelLayer:
        traits = AttentionTraits(is_interleaved=True, rotates=rotates)
        return ParallelLayer(self, index, self.build_mlp(index), traits=traits)


class Cohere2ForCausalLM(CohereForCausalLM):
    """Command R7B and A: rotary embeddings in sliding-window layers, none in full-attention
    layers."""

    def build_layer(self, index: int) -> ParallelLayer:
        """Builds a layer with a window and rotary embedding, or without either."""
        return self._build_layer(index, rotates=self.config.windows[index] is not None)


class AveragingMoeMLP(MoeMLP):
    """Averages the outputs of the routed experts and of the shared expert."""

    def forward(self, hidden: torch.Tensor, fp32_input: torch.Tensor | None = None) -> torch.Tensor:
        """Maps inputs [T, hidden] to outputs [T, hidden]."""
        return super().forward(hidden, fp32_input) / 2


class Cohere2MoeForCausalLM(CohereForCausalLM):
    """Command A+ and North Mini: experts in all but the first few layers."""

    def build_layer(self, index: int) -> ParallelLayer:
        """Builds a layer with or without rotary embedding."""
        assert self.config.rotating is not None, "the family's schema sets it"
        return self._build_layer(index, rotates=self.config.rotating[index])

    def build_mlp(self, index: int) -> FeedForward:
        """Builds experts, or the MLP of one of the first layers."""
        moe = self.config.moe
        assert moe is not None, "the architecture has experts"
        if index in moe.dense_layers:
            return GatedMLP(self.config, self.options, int(self.extra("dense_size")))
        block = AveragingMoeMLP if self.extra("averages") else MoeMLP
        return block(self.config, self.options, as_stored(MoeNames(), self.config))

    def build_norm(self) -> HiddenNorm:
        """RMSNorm or LayerNorm without bias, depending on which epsilon config.json has."""
        if not self.extra("has_rms_norm"):
            return super().build_norm()
        return RMSNorm(self.config.hidden_size, self.config.rms_norm_eps, self.options)
