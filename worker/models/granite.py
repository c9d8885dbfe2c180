"""Granite 3 (huggingface.co/ibm-granite) and MiniCPM (huggingface.co/openbmb): Llama whose
embeddings, blocks and logits are scaled; dense, or with experts."""

from __future__ import annotations

import torch

from worker.models.context import ForwardContext
from worker.models.decoder import DecoderModel, FeedForward
from worker.models.layers import AttentionTraits, GatedMLP
from worker.models.llama import LlamaLayer
from worker.models.moe import MoeMLP, MoeNames, StackedNames

_NAMES = MoeNames(
    router="router.layer",
    stacked=StackedNames(gate_up="input_linear.weight", down="output_linear.weight"),
)
_MINICPM_NAMES = MoeNames(gate="w1", up="w3", down="w2")


class GraniteLayer(LlamaLayer):
    """x + m * attention(norm(x)), then x + m * mlp(norm(x)); m is `residual_multiplier`."""

    def __init__(
        self, model: DecoderModel, index: int, mlp: FeedForward, mlp_name: str = "mlp"
    ) -> None:
        traits = AttentionTraits(scale=float(model.own("attention_multiplier")))
        super().__init__(model, index, mlp, traits=traits, mlp_name=mlp_name)
        self._multiplier = float(model.own("residual_multiplier"))

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        ctx: ForwardContext,
        read: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The block's output, times m, and the residual that it is still to be added to; where no
        layer follows, those of the tokens `read` [S]."""
        input_norm, post_attention_norm = self.norms
        if residual is None:
            residual, hidden = hidden, input_norm.forward(hidden)
        else:
            hidden, residual = input_norm.forward_add(hidden, residual)
        hidden = self.attention.forward(hidden, positions, ctx, read) * self._multiplier
        if read is not None:
            residual = residual.index_select(0, read)
            if not len(read):
                return hidden, residual
        hidden, residual = post_attention_norm.forward_add(hidden, residual)
        return self.mlp.forward(hidden) * self._multiplier, residual


class GraniteForCausalLM(DecoderModel):
    """Embeddings times `embedding_multiplier`, logits over `logits_scaling`."""

    def build_layer(self, index: int) -> GraniteLayer:
        """Every layer is alike."""
        return GraniteLayer(self, index, GatedMLP(self.config, self.options))

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Token ids [T] to the first layer's input [T, hidden]."""
        return super().embed(input_ids) * float(self.own("embedding_multiplier"))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states of the rows that sample [R, hidden] to fp32 logits [R, vocab_size]."""
        return super().compute_logits(hidden) / float(self.own("logits_scaling"))


class GraniteMoeForCausalLM(GraniteForCausalLM):
    """A softmax over the best experts alone is one over all, made to sum to one."""

    def build_layer(self, index: int) -> GraniteLayer:
        """Every layer is alike."""
        moe = self.config.moe
        assert moe is not None, "the architecture has experts"
        mlp = MoeMLP(self.config, moe, self.options, _NAMES)
        return GraniteLayer(self, index, mlp, "block_sparse_moe")


class MiniCPMForCausalLM(GraniteForCausalLM):
    """Its scales are translated into Granite's. It has experts in all layers, or in none."""

    def build_layer(self, index: int) -> GraniteLayer:
        """Every layer is alike."""
        moe = self.config.moe
        if moe is None:
            return super().build_layer(index)
        return GraniteLayer(self, index, MoeMLP(self.config, moe, self.options, _MINICPM_NAMES))
