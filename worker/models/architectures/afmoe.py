"""Trinity (huggingface.co/arcee-ai): gated attention, norms before and after each block, and
experts.

Schema: `config/vendors/arcee.py`.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from worker.models.architectures.glm4 import SandwichLayer
from worker.models.architectures.qwen3_moe import Qwen3MoeForCausalLM
from worker.models.layers.attention import AttentionNames, AttentionTraits
from worker.models.layers.moe import MoeNames

_ATTENTION_NAMES = AttentionNames(gate="gate_proj")


class AfmoeLayer(SandwichLayer):
    """A layer with norms before and after each block, named as in Trinity's checkpoints."""

    norm_names: ClassVar[tuple[str, ...]] = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_mlp_layernorm",
        "post_mlp_layernorm",
    )


class AfmoeForCausalLM(Qwen3MoeForCausalLM):
    """Trinity: rotary embeddings in sliding-window layers, none in full-attention layers."""

    moe_names: ClassVar[MoeNames] = MoeNames(router="router.gate", bias="expert_bias")

    def build_layer(self, index: int) -> AfmoeLayer:
        """Builds a layer with a window and rotary embedding, or without either."""
        rotates = self.config.windows[index] is not None
        traits = AttentionTraits(names=_ATTENTION_NAMES, rotates=rotates, has_gate=True)
        return AfmoeLayer(self, index, self.build_mlp(index), traits=traits)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Maps token ids [T] to the first layer's input [T, hidden], scaled if `mup_enabled` is
        set."""
        hidden = super().embed(input_ids)
        return hidden * self.config.hidden_size**0.5 if self.extra("mup_enabled") else hidden
