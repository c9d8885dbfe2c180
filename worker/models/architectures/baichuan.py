"""Baichuan 2 7B (huggingface.co/baichuan-inc): Llama with a different checkpoint layout.

Schema: `config/vendors/baichuan.py`.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.llama import LlamaLayer
from worker.models.layers.attention import AttentionNames, AttentionTraits, GatedMLP


class BaichuanForCausalLM(DecoderModel):
    """Baichuan 2 7B: Llama with a fused QKV tensor in checkpoints, and an LM head whose rows are
    L2-normalized."""

    scales_head: ClassVar[bool] = True

    def build_layer(self, index: int) -> LlamaLayer:
        """Builds a layer; all layers have the same structure."""
        names = AttentionNames(q="W_pack", k="W_pack", v="W_pack", is_fused=True)
        mlp = GatedMLP(self.config, self.options)
        return LlamaLayer(self, index, mlp, traits=AttentionTraits(names=names))

    def process_after_loading(self) -> None:
        """L2-normalizes the rows of the LM head, then packs the loaded weights."""
        if self.config.pooling is None:
            rows = self.lm_head.source(self.embed_tokens).weight
            lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float32)
            rows.div_(lengths.clamp_min(1e-12))  # padding rows are 0
        super().process_after_loading()
