"""Granite 3 (huggingface.co/ibm-granite) and MiniCPM (huggingface.co/openbmb): Llama whose
embeddings, blocks and logits are scaled; dense, or with experts."""

from __future__ import annotations

import torch

from worker.models.decoder import DecoderModel, FeedForward
from worker.models.layers import AttentionTraits, GatedMLP
from worker.models.llama import LlamaLayer
from worker.models.moe import MoeMLP, MoeNames, StackedNames
from worker.models.norms import RMSNorm

_NAMES = MoeNames(
    router="router.layer",
    stacked=StackedNames(gate_up="input_linear.weight", down="output_linear.weight"),
)
_MINICPM_NAMES = MoeNames(gate="w1", up="w3", down="w2")


class GraniteLayer(LlamaLayer):
    """x + m * attention(norm(x)), then x + m * mlp(norm(x)); m is `residual_multiplier`, and norms
    know it."""

    def __init__(
        self, model: DecoderModel, index: int, mlp: FeedForward, mlp_name: str = "mlp"
    ) -> None:
        traits = AttentionTraits(scale=float(model.own("attention_multiplier")))
        super().__init__(model, index, mlp, traits=traits, mlp_name=mlp_name)


class GraniteForCausalLM(DecoderModel):
    """Embeddings times `embedding_multiplier`, logits over `logits_scaling`."""

    def build_layer(self, index: int) -> GraniteLayer:
        """Every layer is alike."""
        return GraniteLayer(self, index, GatedMLP(self.config, self.options))

    def build_norm(self) -> RMSNorm:
        """Blocks' outputs are scaled where they are added to the residual, before each norm."""
        scale = float(self.own("residual_multiplier"))
        size, eps = self.config.hidden_size, self.config.rms_norm_eps
        return RMSNorm(size, eps, self.options, block_scale=scale)

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
        mlp = MoeMLP(self.config, self.options, _NAMES)
        return GraniteLayer(self, index, mlp, "block_sparse_moe")


class MiniCPMForCausalLM(GraniteForCausalLM):
    """Its scales are translated into Granite's. It has experts in all layers, or in none."""

    def build_layer(self, index: int) -> GraniteLayer:
        """Every layer is alike."""
        if self.config.moe is None:
            return super().build_layer(index)
        return GraniteLayer(self, index, MoeMLP(self.config, self.options, _MINICPM_NAMES))
