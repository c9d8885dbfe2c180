"""Laguna (huggingface.co/poolside): softplus-gated attention, a per-layer number of heads, and
experts.

Schema: `config/vendors/poolside.py`.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from kernels import rowwise
from worker.models.architectures.llama import LlamaLayer
from worker.models.architectures.qwen3_moe import Qwen3MoeForCausalLM
from worker.models.layers.attention import AttentionNames, AttentionTraits
from worker.models.layers.moe import MoeNames

_NAMES = AttentionNames(gate="g_proj")


class LagunaForCausalLM(Qwen3MoeForCausalLM):
    """Laguna: sliding-window and full-attention layers, which differ in query heads and rotary
    tables."""

    moe_names: ClassVar[MoeNames] = MoeNames(
        bias="experts.e_score_correction_bias", shared="shared_expert"
    )

    def build_layer(self, index: int) -> LlamaLayer:
        """Builds a layer with a gate per head, or per output feature."""
        traits = AttentionTraits(
            names=_NAMES,
            has_gate=True,
            gates_heads=self.extra("gating") != "per-element",
            gate=_softplus,
        )
        return LlamaLayer(self, index, self.build_mlp(index), traits=traits)


def _softplus(gate: torch.Tensor) -> torch.Tensor:
    """Softplus of gates, computed in fp32."""
    return rowwise.softplus(gate.float()).to(gate.dtype)
