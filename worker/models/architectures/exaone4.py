"""EXAONE 4 and K-EXAONE (huggingface.co/LGAI-EXAONE): per-head QK norm; rotary embeddings in
sliding-window layers, none in full-attention layers.

Schema: `config/vendors/lg.py`.
"""

from __future__ import annotations

from typing import ClassVar

from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.llama import LlamaLayer
from worker.models.architectures.olmo import PostNormLayer
from worker.models.architectures.qwen3_moe import Qwen3MoeForCausalLM
from worker.models.layers.attention import AttentionTraits, GatedMLP
from worker.models.layers.moe import MoeNames


class Exaone4ForCausalLM(DecoderModel):
    """EXAONE 4: norms after the blocks, as in OLMo 2."""

    def build_layer(self, index: int) -> PostNormLayer:
        """Builds a layer; if some layers have windows, full-attention layers have no rotary
        embedding."""
        mlp = GatedMLP(self.config, self.options)
        return PostNormLayer(self, index, mlp, traits=_traits(self, index))


class ExaoneMoeForCausalLM(Qwen3MoeForCausalLM):
    """K-EXAONE: norms before the blocks, and experts."""

    moe_names: ClassVar[MoeNames] = MoeNames(bias="e_score_correction_bias")

    def build_layer(self, index: int) -> LlamaLayer:
        """Builds a layer; if some layers have windows, full-attention layers have no rotary
        embedding."""
        return LlamaLayer(self, index, self.build_mlp(index), traits=_traits(self, index))


def _traits(model: DecoderModel, index: int) -> AttentionTraits:
    """Attention traits of a layer. Models with sliding windows have no rotary embedding in
    full-attention layers."""
    rotates = model.extra("sliding_window") is None or model.config.windows[index] is not None
    return AttentionTraits(rotates=rotates)
