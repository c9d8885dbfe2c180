"""Granite (huggingface.co/ibm-granite) and MiniCPM (huggingface.co/openbmb): Llama whose
embeddings, blocks and logits are scaled; dense, or with experts.

Schemas: `config/vendors/ibm.py` and `config/vendors/openbmb.py`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch

from worker.models.architectures.decoder import DecoderModel, FeedForward
from worker.models.architectures.llama import LlamaLayer
from worker.models.layers.attention import AttentionTraits, GatedMLP
from worker.models.layers.moe import MoeMLP, MoeNames, StackedNames
from worker.models.layers.norms import RMSNorm
from worker.models.layers.rope import cos_sin_table

_NAMES = MoeNames(
    router="router.layer",
    stacked=StackedNames(gate_up="input_linear.weight", down="output_linear.weight"),
)
_MINICPM_NAMES = MoeNames(gate="w1", up="w3", down="w2")


class GraniteLayer(LlamaLayer):
    """A layer with scaled blocks: x + m * attention(norm(x)), then x + m * mlp(norm(x)). Norms
    that add to the residual multiply by m, the `residual_multiplier`."""

    def __init__(
        self,
        model: DecoderModel,
        index: int,
        mlp: FeedForward,
        mlp_name: str = "mlp",
        *,
        rotates: bool = True,
    ) -> None:
        traits = AttentionTraits(
            scale=float(model.extra("attention_multiplier")),
            rotates=rotates,
            has_sinks=model.config.has_sinks,
        )
        super().__init__(model, index, mlp, traits=traits, mlp_name=mlp_name)


class GraniteForCausalLM(DecoderModel):
    """Granite 3, dense: embeddings times `embedding_multiplier`, logits over `logits_scaling`."""

    def build_layer(self, index: int) -> GraniteLayer:
        """Builds a layer; all are alike."""
        return GraniteLayer(self, index, GatedMLP(self.config, self.options))

    def build_norm(self) -> RMSNorm:
        """Builds a norm that scales a block's output before it adds it to the residual."""
        scale = float(self.extra("residual_multiplier"))
        size, eps = self.config.hidden_size, self.config.rms_norm_eps
        return RMSNorm(size, eps, self.options, block_scale=scale)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Token ids [T] to the first layer's input [T, hidden]."""
        return super().embed(input_ids) * float(self.extra("embedding_multiplier"))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states of the rows that sample [R, hidden] to fp32 logits [R, vocab_size]."""
        return super().compute_logits(hidden) / float(self.extra("logits_scaling"))


class GraniteMoeForCausalLM(GraniteForCausalLM):
    """Granite 3 with experts. Its softmax over the chosen experts is computed as one over all
    experts, normalised to sum to 1 over the chosen."""

    def build_layer(self, index: int) -> GraniteLayer:
        """Builds a layer; all are alike."""
        mlp = MoeMLP(self.config, self.options, _NAMES)
        return GraniteLayer(self, index, mlp, "block_sparse_moe")


class GraniteSWAForCausalLM(GraniteForCausalLM):
    """Granite with sliding windows and attention sinks; the base of the rotary embedding differs
    between layers, some of which may have none."""

    def build_layer(self, index: int) -> GraniteLayer:
        """Builds a layer; they differ in windows and rotary tables only."""
        mlp = GatedMLP(self.config, self.options)
        return GraniteLayer(self, index, mlp, rotates=self._thetas[index] > 0)

    def rotary_table(self, index: int) -> torch.Tensor:
        """Cosines and sines [positions, rotary_dim] of a layer; layers without rotary embedding do
        not read theirs."""
        return self._tables.get(self._thetas[index], self.cos_sin)

    @property
    def _thetas(self) -> list[float]:
        """Base of each layer's rotary embedding; 0 for a layer without."""
        return list(map(float, self.extra("layer_rope_theta")))

    @cached_property
    def _tables(self) -> dict[float, torch.Tensor]:
        """Cosines and sines by base."""
        rope, size = self.config.rope, self.config.rotary_dim
        return {
            theta: cos_sin_table(
                replace(rope, theta=theta), size, len(self.cos_sin), self.options.device
            )
            for theta in set(self._thetas) - {0.0}
        }


class MiniCPMForCausalLM(GraniteForCausalLM):
    """MiniCPM, whose scales are translated to Granite's; experts in all layers, or in none."""

    def build_layer(self, index: int) -> GraniteLayer:
        """Builds a layer; all are alike."""
        if self.config.moe is None:
            return super().build_layer(index)
        return GraniteLayer(self, index, MoeMLP(self.config, self.options, _MINICPM_NAMES))
