"""MiniMax-M2 (huggingface.co/MiniMaxAI): experts in all layers, chosen by sigmoids and a bias.

Schema: `config/vendors/minimax.py`.
"""

from __future__ import annotations

from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.llama import LlamaLayer
from worker.models.layers.attention import AttentionTraits
from worker.models.layers.moe import MoeMLP, MoeNames

_NAMES = MoeNames(gate="w1", up="w3", down="w2", bias="e_score_correction_bias")


class MiniMaxM2ForCausalLM(DecoderModel):
    """MiniMax-M2: QK norm over all heads together, and rotary embedding in part of each head."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Builds a layer; all layers have the same structure."""
        mlp = MoeMLP(self.config, self.options, _NAMES)
        traits = AttentionTraits(has_wide_norms=True)
        return LlamaLayer(self, index, mlp, traits=traits, mlp_name="block_sparse_moe")
