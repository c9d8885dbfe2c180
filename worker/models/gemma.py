"""Gemma 1, 2 and 3 (huggingface.co/google): weights of norms count from 1, embeddings grow."""

from __future__ import annotations

from typing import ClassVar

import torch

from kernels import gelu_and_mul, soft_cap_
from worker.models.config import ModelConfig
from worker.models.decoder import DecoderModel
from worker.models.glm4 import SandwichLayer
from worker.models.layers import AttentionTraits, GatedMLP
from worker.models.linear_method import LayerOptions
from worker.models.llama import LlamaLayer


class GemmaForCausalLM(DecoderModel):
    """Llama's layers, whose MLP is gated by GELU.

    Raises:
        ValueError: it is to compute in float16, whose range hidden states exceed.
    """

    norm_offset: ClassVar[float] = 1.0

    def __init__(self, config: ModelConfig, options: LayerOptions, max_model_len: int) -> None:
        if options.dtype == torch.float16:
            raise ValueError("--dtype float16 is too small for Gemma's hidden states: use bfloat16")
        super().__init__(config, options, max_model_len)
        # Rounded as the weights are, with which it is multiplied.
        self._embedding_scale = torch.tensor(config.hidden_size**0.5).to(options.dtype).item()

    def build_layer(self, index: int) -> LlamaLayer:
        """Every layer is alike."""
        return LlamaLayer(self, index, self.build_mlp())

    def build_mlp(self) -> GatedMLP:
        """Gated by GELU, by its approximation with tanh."""
        return GatedMLP(self.config, self.options, activate=gelu_and_mul)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Token ids [T] to the first layer's input [T, hidden]."""
        return super().embed(input_ids) * self._embedding_scale


class GemmaLayer(SandwichLayer):
    """Norms before and behind each block, by other names than GLM-4's."""

    norm_names: ClassVar[tuple[str, ...]] = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )


class Gemma2ForCausalLM(GemmaForCausalLM):
    """Layers see a window, or all, by turns. Scores of attention and logits are capped.

    In Gemma 3 these are not; layers with a window rotate by a table of their own, and each head of
    q and k is normalised."""

    def build_layer(self, index: int) -> GemmaLayer:
        """Every layer is alike, windows and tables apart."""
        scale = float(self.own("query_pre_attn_scalar")) ** -0.5
        traits = AttentionTraits(scale=scale, norm_offset=self.norm_offset)
        return GemmaLayer(self, index, self.build_mlp(), traits=traits)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states of the rows that sample [R, hidden] to fp32 logits [R, vocab_size]."""
        logits, cap = super().compute_logits(hidden), self.own("final_logit_softcapping")
        return logits if cap is None else soft_cap_(logits, float(cap))
