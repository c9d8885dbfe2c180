"""Hunyuan-A13B (huggingface.co/tencent): QK norm after rotary embedding, and experts.

Schema: `config/vendors/tencent.py`.
"""

from __future__ import annotations

from typing import ClassVar

from worker.models.architectures.llama import LlamaLayer
from worker.models.architectures.qwen3_moe import Qwen3MoeForCausalLM
from worker.models.layers.attention import AttentionNames, AttentionTraits
from worker.models.layers.moe import MoeNames

_TRAITS = AttentionTraits(
    names=AttentionNames(q_norm="query_layernorm", k_norm="key_layernorm"),
    rotates_first=True,
)


class HunYuanMoEV1ForCausalLM(Qwen3MoeForCausalLM):
    """Hunyuan-A13B: experts and a shared expert in all layers."""

    moe_names: ClassVar[MoeNames] = MoeNames(router="gate.wg", shared="shared_mlp")

    def build_layer(self, index: int) -> LlamaLayer:
        """Builds a layer; all layers have the same structure."""
        return LlamaLayer(self, index, self.build_mlp(index), traits=_TRAITS)
