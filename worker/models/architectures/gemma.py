"""Gemma 1, 2 and 3 (huggingface.co/google): norms multiply by 1 + weight; embeddings are scaled.

Schema: `config/vendors/google.py`.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from kernels import GELU, soft_cap_
from worker.models.architectures.decoder import DecoderLayer, DecoderModel
from worker.models.architectures.glm4 import SandwichLayer
from worker.models.architectures.llama import LlamaLayer
from worker.models.config.model_config import ModelConfig
from worker.models.layers.attention import AttentionTraits, GatedMLP
from worker.models.layers.linear_method import LayerOptions


class GemmaForCausalLM(DecoderModel):
    """Gemma 1: Llama's layers with an MLP gated by GELU.

    Raises:
        ValueError: the data type is float16, whose range the hidden states exceed.
    """

    norm_offset: ClassVar[float] = 1.0

    def __init__(self, config: ModelConfig, options: LayerOptions, max_model_len: int) -> None:
        if options.dtype == torch.float16:
            raise ValueError(
                "Gemma's hidden states overflow with --dtype float16: use --dtype bfloat16"
            )
        super().__init__(config, options, max_model_len)
        # Rounded to the weights' type before the multiplication, as in transformers.
        self._embedding_scale = torch.tensor(config.hidden_size**0.5).to(options.dtype).item()

    def build_layer(self, index: int) -> DecoderLayer:
        """Builds a layer; all layers have the same structure."""
        return LlamaLayer(self, index, self.build_mlp())

    def build_mlp(self, size: int = 0) -> GatedMLP:
        """Builds an MLP gated by GELU with the tanh approximation, with the configuration's
        intermediate size or with another size."""
        return GatedMLP(self.config, self.options, size, activate=GELU)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Maps token ids [T] to the first layer's input [T, hidden]."""
        return super().embed(input_ids) * self._embedding_scale

    def embed_shares(self, shares: torch.Tensor) -> torch.Tensor:
        """Maps distributions over tokens [T, vocab_size] to weighted averages of embeddings [T,
        hidden]."""
        return super().embed_shares(shares) * self._embedding_scale


class GemmaLayer(SandwichLayer):
    """A layer with norms before and after each block, with Gemma's checkpoint names."""

    norm_names: ClassVar[tuple[str, ...]] = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )


class Gemma2ForCausalLM(GemmaForCausalLM):
    """Gemma 2 and 3: alternating sliding-window and full-attention layers.

    Gemma 2 soft-caps attention scores and logits. Gemma 3 does not; it has QK norm, and
    sliding-window layers have a separate rotary embedding.
    """

    def build_layer(self, index: int) -> DecoderLayer:
        """Builds a layer; layers differ only in windows and rotary tables."""
        scale = float(self.extra("query_pre_attn_scalar")) ** -0.5
        traits = AttentionTraits(scale=scale, norm_offset=self.norm_offset)
        return GemmaLayer(self, index, self.build_mlp(), traits=traits)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Computes fp32 logits [R, vocab_size] from the hidden states [R, hidden] of the rows to
        sample."""
        logits, cap = super().compute_logits(hidden), self.extra("final_logit_softcapping")
        return logits if cap is None else soft_cap_(logits, float(cap))
