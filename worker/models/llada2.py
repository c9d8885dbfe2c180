"""LLaDA 2 (huggingface.co/inclusionAI): Ling 2 whose tokens are decided block by block."""

from __future__ import annotations

from typing import ClassVar

from worker.models.layers import Attention, AttentionNames
from worker.models.qwen3_moe import Qwen3MoeForCausalLM

_NAMES = AttentionNames(
    q="query_key_value",
    k="query_key_value",
    v="query_key_value",
    output="dense",
    q_norm="query_layernorm",
    k_norm="key_layernorm",
    is_fused=True,
)


class LLaDA2MoeModelLM(Qwen3MoeForCausalLM):
    """Part of each head rotates; q, k and v are one tensor; experts are chosen from groups."""

    embedding_name: ClassVar[str] = "model.word_embeddings"
    attention_name: ClassVar[str] = "attention"

    def build_attention(self, layer_index: int) -> Attention:
        """Normalised q and k, no biases."""
        return Attention(
            self.config,
            self.options,
            layer_index=layer_index,
            cos_sin=self.cos_sin,
            qkv_bias=False,
            output_bias=False,
            qk_norm=True,
            names=_NAMES,
        )
