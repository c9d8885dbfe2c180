"""GLM-4.5, 4.6 and 4.7 (huggingface.co/zai-org): experts beside one that every token takes."""

from __future__ import annotations

from worker.models.decoder import DecoderModel, FeedForward
from worker.models.layers import GatedMLP
from worker.models.llama import LlamaLayer
from worker.models.moe import MoeMLP, MoeNames

_NAMES = MoeNames(bias="gate.e_score_correction_bias")


class Glm4MoeForCausalLM(DecoderModel):
    """Half of each head rotates; the first layers have a single MLP."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Llama's, with experts."""
        return LlamaLayer(self, index, self._build_mlp(index))

    def _build_mlp(self, index: int) -> FeedForward:
        moe = self.config.moe
        assert moe is not None, "the architecture has experts"
        if index in moe.dense_layers:
            return GatedMLP(self.config, self.options)
        return MoeMLP(self.config, moe, self.options, _NAMES)
