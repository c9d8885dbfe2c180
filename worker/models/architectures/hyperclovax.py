"""HyperCLOVA X SEED Think (huggingface.co/naver-hyperclovax): Granite with norms before and after
the blocks.

Schema: `config/vendors/naver.py`.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.glm4 import SandwichLayer
from worker.models.architectures.granite import GraniteForCausalLM
from worker.models.architectures.llama import LlamaLayer
from worker.models.layers.attention import AttentionTraits, GatedMLP


class HyperCLOVAXLayer(SandwichLayer):
    """A layer with scaled blocks between norms: x + m * norm(attention(norm(x))), then x + m *
    norm(mlp(norm(x))). Norms that add a block's output to the residual multiply it by m."""

    norm_names: ClassVar[tuple[str, ...]] = (
        *("input_layernorm", "post_norm1"),
        *("post_attention_layernorm", "post_norm2"),
    )


class HyperCLOVAXForCausalLM(GraniteForCausalLM):
    """HyperCLOVA X: Granite's scales, but logits are multiplied by `logits_scaling`."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Builds a layer; all layers have the same structure."""
        layer = HyperCLOVAXLayer if self.extra("use_post_norm") else LlamaLayer
        traits = AttentionTraits(scale=float(self.extra("attention_multiplier")))
        return layer(self, index, GatedMLP(self.config, self.options), traits=traits)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Computes fp32 logits [R, vocab_size] from the hidden states [R, hidden] of the rows to
        sample."""
        return DecoderModel.compute_logits(self, hidden) * float(self.extra("logits_scaling"))
