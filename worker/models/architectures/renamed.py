"""Families with Llama's mathematics and other tensors: InternLM 2 (huggingface.co/internlm),
Baichuan 2 7B (huggingface.co/baichuan-inc), Qwen 1 (huggingface.co/Qwen)."""

from __future__ import annotations

from typing import ClassVar

import torch

from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.llama import LlamaLayer
from worker.models.layers.attention import AttentionNames, AttentionTraits, GatedMLP


class InternLM2Layer(LlamaLayer):
    """A layer as Llama's, with InternLM 2's names of norms in a checkpoint."""

    norm_names: ClassVar[tuple[str, ...]] = ("attention_norm", "ffn_norm")


class InternLM2ForCausalLM(DecoderModel):
    """InternLM 2: Llama with q, k and v as one tensor in a checkpoint, in which the rows of each KV
    head are together."""

    embedding_name: ClassVar[str] = "model.tok_embeddings"
    head_name: ClassVar[str] = "output"

    def build_layer(self, index: int) -> InternLM2Layer:
        """Builds a layer; all are alike."""
        names = AttentionNames(q="wqkv", k="wqkv", v="wqkv", output="wo", is_grouped=True)
        return InternLM2Layer(
            *(self, index, GatedMLP(self.config, self.options, names=("w1", "w3", "w2"))),
            traits=AttentionTraits(names=names),
            attention_name="attention",
            mlp_name="feed_forward",
        )


class BaichuanForCausalLM(DecoderModel):
    """Baichuan 2 7B: Llama with q, k and v as one tensor in a checkpoint, and an LM head whose rows
    are normalised to length 1."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Builds a layer; all are alike."""
        names = AttentionNames(q="W_pack", k="W_pack", v="W_pack", is_fused=True)
        mlp = GatedMLP(self.config, self.options)
        return LlamaLayer(self, index, mlp, traits=AttentionTraits(names=names))

    def process_after_loading(self) -> None:
        """Packs the loaded weights, after the rows of the LM head are normalised."""
        rows = self.lm_head.source(self.embed_tokens).weight
        lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float32)
        rows.div_(lengths.clamp_min(1e-12))  # padding rows are 0
        super().process_after_loading()


class QWenLayer(LlamaLayer):
    """A layer as Llama's, with Qwen 1's names of norms in a checkpoint."""

    norm_names: ClassVar[tuple[str, ...]] = ("ln_1", "ln_2")


class QWenLMHeadModel(DecoderModel):
    """Qwen 1: Llama with q, k and v as one tensor in a checkpoint, with biases. Sequences are
    limited to the trained length, beyond which rotary embedding and queries would be scaled."""

    embedding_name: ClassVar[str] = "transformer.wte"
    layers_name: ClassVar[str] = "transformer.h"
    norm_name: ClassVar[str] = "transformer.ln_f"

    def build_layer(self, index: int) -> QWenLayer:
        """Builds a layer; all are alike. The gate is w2 in a checkpoint."""
        names = AttentionNames(q="c_attn", k="c_attn", v="c_attn", output="c_proj", is_fused=True)
        return QWenLayer(
            *(self, index, GatedMLP(self.config, self.options, names=("w2", "w1", "c_proj"))),
            traits=AttentionTraits(names=names),
            attention_name="attn",
        )
