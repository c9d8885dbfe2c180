"""Mixtral (huggingface.co/mistralai): Mistral with experts in all layers.

Schema: `config/vendors/mistral.py`.
"""

from __future__ import annotations

from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.llama import LlamaLayer
from worker.models.layers.moe import MoeMLP, MoeNames

_NAMES = MoeNames(gate="w1", up="w3", down="w2")


class MixtralForCausalLM(DecoderModel):
    """Mixtral: experts as in Qwen3-MoE, with different checkpoint names."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Builds a layer; all layers have the same structure."""
        mlp = MoeMLP(self.config, self.options, _NAMES)
        return LlamaLayer(self, index, mlp, mlp_name="block_sparse_moe")
