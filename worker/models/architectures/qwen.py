"""Qwen 1 (huggingface.co/Qwen): Llama with a different checkpoint layout.

Schema: `config/vendors/qwen.py`.
"""

from __future__ import annotations

from typing import ClassVar

from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.llama import LlamaLayer
from worker.models.layers.attention import AttentionNames, AttentionTraits, GatedMLP


class QWenLayer(LlamaLayer):
    """Llama layer with Qwen 1's checkpoint names for the norms."""

    norm_names: ClassVar[tuple[str, ...]] = ("ln_1", "ln_2")


class QWenLMHeadModel(DecoderModel):
    """Qwen 1: Llama with a fused QKV tensor in checkpoints, with biases. Sequences are limited to
    the training length, beyond which rotary embedding and queries would be scaled."""

    embedding_name: ClassVar[str] = "transformer.wte"
    layers_name: ClassVar[str] = "transformer.h"
    norm_name: ClassVar[str] = "transformer.ln_f"

    def build_layer(self, index: int) -> QWenLayer:
        """Builds a layer; all layers have the same structure. The gate is named w2 in
        checkpoints."""
        names = AttentionNames(q="c_attn", k="c_attn", v="c_attn", output="c_proj", is_fused=True)
        return QWenLayer(
            *(self, index, GatedMLP(self.config, self.options, names=("w2", "w1", "c_proj"))),
            traits=AttentionTraits(names=names),
            attention_name="attn",
        )
