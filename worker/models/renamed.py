"""Llama's mathematics under other names and in other tensors: InternLM 2
(huggingface.co/internlm), Baichuan 2 7B (huggingface.co/baichuan-inc), Qwen 1
(huggingface.co/Qwen)."""

from __future__ import annotations

from typing import ClassVar

import torch

from worker.models.decoder import DecoderModel
from worker.models.layers import AttentionNames, AttentionTraits, GatedMLP
from worker.models.llama import LlamaLayer


class InternLM2Layer(LlamaLayer):
    """Llama's by other names."""

    norm_names: ClassVar[tuple[str, ...]] = ("attention_norm", "ffn_norm")


class InternLM2ForCausalLM(DecoderModel):
    """q, k and v are one tensor of a checkpoint, which has each kv head's rows together."""

    embedding_name: ClassVar[str] = "model.tok_embeddings"
    head_name: ClassVar[str] = "output"

    def build_layer(self, index: int) -> InternLM2Layer:
        """Every layer is alike."""
        names = AttentionNames(q="wqkv", k="wqkv", v="wqkv", output="wo", is_grouped=True)
        return InternLM2Layer(
            *(self, index, GatedMLP(self.config, self.options, names=("w1", "w3", "w2"))),
            traits=AttentionTraits(names=names),
            attention_name="attention",
            mlp_name="feed_forward",
        )


class BaichuanForCausalLM(DecoderModel):
    """q, k and v are one tensor; every token's row of the scores' weight is brought to length 1."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Every layer is alike."""
        names = AttentionNames(q="W_pack", k="W_pack", v="W_pack", is_fused=True)
        mlp = GatedMLP(self.config, self.options)
        return LlamaLayer(self, index, mlp, traits=AttentionTraits(names=names))

    def pack(self) -> None:
        """Brings the loaded weights into the form that torch uses."""
        rows = self.lm_head.source(self.embed_tokens).weight
        lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float32)
        rows.div_(lengths.clamp_min(1e-12))  # rows that only fill up the ranks' shares are 0
        super().pack()


class QWenLayer(LlamaLayer):
    """Llama's by other names."""

    norm_names: ClassVar[tuple[str, ...]] = ("ln_1", "ln_2")


class QWenLMHeadModel(DecoderModel):
    """q, k and v are one tensor, and have biases. Up to the length that it was trained for: beyond,
    the rotation stretches and queries grow."""

    embedding_name: ClassVar[str] = "transformer.wte"
    layers_name: ClassVar[str] = "transformer.h"
    norm_name: ClassVar[str] = "transformer.ln_f"

    def build_layer(self, index: int) -> QWenLayer:
        """Every layer is alike. A checkpoint's w2 is the gate."""
        names = AttentionNames(q="c_attn", k="c_attn", v="c_attn", output="c_proj", is_fused=True)
        return QWenLayer(
            *(self, index, GatedMLP(self.config, self.options, names=("w2", "w1", "c_proj"))),
            traits=AttentionTraits(names=names),
            attention_name="attn",
        )
