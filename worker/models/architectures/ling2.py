"""Ling 2, and LLaDA 2, which is Ling 2 trained for block diffusion (huggingface.co/inclusionAI).

Schema: `config/vendors/inclusionai.py`.
"""

from __future__ import annotations

from typing import ClassVar

from worker.models.architectures.llama import LlamaLayer
from worker.models.architectures.qwen3_moe import Qwen3MoeForCausalLM
from worker.models.layers.attention import AttentionNames, AttentionTraits

_NAMES = AttentionNames(
    q="query_key_value",
    k="query_key_value",
    v="query_key_value",
    output="dense",
    q_norm="query_layernorm",
    k_norm="key_layernorm",
    is_fused=True,
)


class BailingMoeV2ForCausalLM(Qwen3MoeForCausalLM):
    """Ling 2 and LLaDA 2: QK norm, rotary embedding in part of each head, a fused QKV tensor, and
    grouped expert selection."""

    embedding_name: ClassVar[str] = "model.word_embeddings"

    def build_layer(self, index: int) -> LlamaLayer:
        """Builds a layer like Qwen3-MoE's, with different checkpoint names."""
        mlp = self.build_mlp(index)
        return LlamaLayer(
            self, index, mlp, attention_name="attention", traits=AttentionTraits(names=_NAMES)
        )
