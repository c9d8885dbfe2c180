"""ERNIE 4.5 (huggingface.co/baidu): Llama whose neighbouring dimensions rotate together."""

from __future__ import annotations

from typing import ClassVar

from worker.models.decoder import DecoderModel
from worker.models.layers import AttentionTraits, GatedMLP
from worker.models.llama import LlamaLayer
from worker.models.moe import MoeNames
from worker.models.qwen3_moe import Qwen3MoeForCausalLM


class Ernie45ForCausalLM(DecoderModel):
    """A checkpoint has Llama's very names, so nothing but the family tells them apart."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Every layer is alike."""
        mlp = GatedMLP(self.config, self.options)
        return LlamaLayer(self, index, mlp, traits=AttentionTraits(is_interleaved=True))


class Ernie45MoeForCausalLM(Qwen3MoeForCausalLM):
    """Experts beside one that every token takes; a bias counts in the choice among them."""

    moe_names: ClassVar[MoeNames] = MoeNames(
        bias="moe_statics.e_score_correction_bias", bias_is_matrix=True
    )

    def build_layer(self, index: int) -> LlamaLayer:
        """Experts, or a single MLP in the layers that config.json names."""
        traits = AttentionTraits(is_interleaved=True)
        return LlamaLayer(self, index, self.build_mlp(index), traits=traits)
