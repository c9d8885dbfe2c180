"""MiMo V2 (huggingface.co/XiaomiMiMo): value heads narrower than key heads, attention sinks in
sliding-window layers, and experts.

Schema: `config/vendors/xiaomi.py`.
"""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

from worker.models.architectures.llama import LlamaLayer
from worker.models.architectures.qwen3_moe import Qwen3MoeForCausalLM
from worker.models.layers.attention import AttentionNames, AttentionTraits
from worker.models.layers.moe import MoeNames

_SINKS = "attention_sink_bias"
_FUSED = "qkv_proj"


class MiMoV2ForCausalLM(Qwen3MoeForCausalLM):
    """MiMo V2: sliding-window and full-attention layers, which differ in KV heads and rotary
    tables."""

    moe_names: ClassVar[MoeNames] = MoeNames(bias="gate.e_score_correction_bias")

    def build_layer(self, index: int) -> LlamaLayer:
        """Builds a layer, with attention sinks if it has a window."""
        return LlamaLayer(self, index, self.build_mlp(index), traits=self._traits(index))

    def build_head_layer(self, index: int) -> LlamaLayer:
        """Builds the MTP head's layer, whose second norm has a different name."""
        return _HeadLayer(self, index, self.build_mlp(index), traits=self._traits(index))

    def _traits(self, index: int) -> AttentionTraits:
        return AttentionTraits(
            names=self._attention_names,
            has_sinks=self.config.windows[index] is not None,
            value_factor=float(self.extra("attention_value_scale")),
        )

    @cached_property
    def _attention_names(self) -> AttentionNames:
        """Names of the attention's weights. Even in sliding-window layers, a fused QKV tensor has
        as many groups of heads as full-attention layers have KV heads."""
        if not self.extra("is_fused"):
            return AttentionNames(sinks=_SINKS)
        return AttentionNames(
            q=_FUSED,
            k=_FUSED,
            v=_FUSED,
            sinks=_SINKS,
            is_grouped=True,
            num_groups=self.config.for_full_layers().num_kv_heads,
        )


class _HeadLayer(LlamaLayer):
    """Decoder layer of the MTP head, with different checkpoint names for the norms."""

    norm_names: ClassVar[tuple[str, ...]] = ("input_layernorm", "pre_mlp_layernorm")
