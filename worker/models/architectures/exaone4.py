"""EXAONE 4 and K-EXAONE (huggingface.co/LGAI-EXAONE): QK norm of each head; windows with rotary
embedding, full attention without.

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
        """Builds a layer with rotary embedding or, if other layers have windows, possibly
        without."""
        mlp = GatedMLP(self.config, self.options)
        return PostNormLayer(self, index, mlp, traits=_traits(self, index))


class ExaoneMoeForCausalLM(Qwen3MoeForCausalLM):
    """K-EXAONE: norms before the blocks, and experts."""

    moe_names: ClassVar[MoeNames] = MoeNames(bias="e_score_correction_bias")

    def build_layer(self, index: int) -> LlamaLayer:
        """Builds a layer with rotary embedding, or, if others have windows, possibly without."""
        return LlamaLayer(self, index, self.build_mlp(index), traits=_traits(self, index))


def _traits(model: DecoderModel, index: int) -> AttentionTraits:
    """Models with sliding windows have no rotary embedding in full-attention layers."""
    rotates = model.extra("sliding_window") is None or model.config.windows[index] is not None
    return AttentionTraits(rotates=rotates)
