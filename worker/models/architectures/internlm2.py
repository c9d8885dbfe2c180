"""InternLM 2 (huggingface.co/internlm): Llama with a different checkpoint layout.

Schema: `config/vendors/internlm.py`.
"""

from __future__ import annotations

from typing import ClassVar

from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.llama import LlamaLayer
from worker.models.layers.attention import AttentionNames, AttentionTraits, GatedMLP


class InternLM2Layer(LlamaLayer):
    """Llama layer with InternLM 2's checkpoint names for the norms."""

    norm_names: ClassVar[tuple[str, ...]] = ("attention_norm", "ffn_norm")


class InternLM2ForCausalLM(DecoderModel):
    """InternLM 2: Llama with a fused QKV tensor in checkpoints, grouped by KV head."""

    embedding_name: ClassVar[str] = "model.tok_embeddings"
    head_name: ClassVar[str] = "output"

    def build_layer(self, index: int) -> InternLM2Layer:
        """Builds a layer; all layers have the same structure."""
        names = AttentionNames(q="wqkv", k="wqkv", v="wqkv", output="wo", is_grouped=True)
        return InternLM2Layer(
            *(self, index, GatedMLP(self.config, self.options, names=("w1", "w3", "w2"))),
            traits=AttentionTraits(names=names),
            attention_name="attention",
            mlp_name="feed_forward",
        )
