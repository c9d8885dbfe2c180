"""Falcon 7B (huggingface.co/tiiuae): attention and an ungated MLP as parallel blocks after one
LayerNorm.

Schema: `config/vendors/tii.py`.
"""

from __future__ import annotations

from typing import ClassVar

from kernels import rowwise
from worker.models.architectures.cohere import ParallelLayer
from worker.models.architectures.stablelm import StableLmForCausalLM
from worker.models.layers.attention import MLP, AttentionNames, AttentionTraits

_FALCON_NAMES = AttentionNames(
    q="query_key_value",
    k="query_key_value",
    v="query_key_value",
    output="dense",
    is_fused=True,
)


class FalconForCausalLM(StableLmForCausalLM):
    """Falcon 7B: multi-query attention with a fused QKV tensor in checkpoints."""

    embedding_name: ClassVar[str] = "transformer.word_embeddings"
    layers_name: ClassVar[str] = "transformer.h"
    norm_name: ClassVar[str] = "transformer.ln_f"

    def build_layer(self, index: int) -> ParallelLayer:
        """Builds a layer; all layers have the same structure."""
        names = {"up_name": "dense_h_to_4h", "down_name": "dense_4h_to_h"}
        mlp = MLP(self.config, self.options, rowwise.gelu, **names)
        traits = AttentionTraits(names=_FALCON_NAMES)
        return ParallelLayer(self, index, mlp, traits=traits, attention_name="self_attention")
