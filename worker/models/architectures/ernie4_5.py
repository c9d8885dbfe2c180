"""ERNIE 4.5 (huggingface.co/baidu), dense or with experts, and Helium (huggingface.co/kyutai):
Llama with interleaved rotary embedding.

Schemas: `config/vendors/baidu.py` and `config/vendors/kyutai.py`.
"""

from __future__ import annotations

from typing import ClassVar

from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.llama import LlamaLayer
from worker.models.architectures.qwen3_moe import Qwen3MoeForCausalLM
from worker.models.layers.attention import AttentionTraits, GatedMLP
from worker.models.layers.moe import MoeNames


class Ernie45ForCausalLM(DecoderModel):
    """Llama with interleaved rotary embedding. Tensors have the same names as Llama's; only
    `architectures` in config.json distinguishes the checkpoints."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Builds a layer; all layers have the same structure."""
        mlp = GatedMLP(self.config, self.options)
        return LlamaLayer(self, index, mlp, traits=AttentionTraits(is_interleaved=True))


class Ernie45MoeForCausalLM(Qwen3MoeForCausalLM):
    """ERNIE 4.5 with experts and shared experts; a bias is added to the scores only for the choice
    of experts."""

    moe_names: ClassVar[MoeNames] = MoeNames(
        bias="moe_statics.e_score_correction_bias", bias_is_matrix=True
    )

    def build_layer(self, index: int) -> LlamaLayer:
        """Builds a layer with experts or with an MLP, as specified in config.json."""
        traits = AttentionTraits(is_interleaved=True)
        return LlamaLayer(self, index, self.build_mlp(index), traits=traits)
