"""Starcoder 2 (huggingface.co/bigcode): LayerNorm and an ungated MLP.

Schema: `config/vendors/bigcode.py`.
"""

from __future__ import annotations

from kernels import rowwise
from worker.models.architectures.llama import LlamaLayer
from worker.models.architectures.stablelm import StableLmForCausalLM
from worker.models.layers.attention import MLP


class Starcoder2ForCausalLM(StableLmForCausalLM):
    """Starcoder 2: biases in all projections, and an ungated MLP."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Builds a layer; all layers have the same structure."""
        names = {"up_name": "c_fc", "down_name": "c_proj"}
        return LlamaLayer(self, index, MLP(self.config, self.options, rowwise.gelu_tanh, **names))
