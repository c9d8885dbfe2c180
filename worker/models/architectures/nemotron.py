"""Nemotron 4 and Minitron (huggingface.co/nvidia): LayerNorm, and an MLP without a gate.

Schema: `config/vendors/nvidia.py`.
"""

from __future__ import annotations

from kernels import squared_relu
from worker.models.architectures.llama import LlamaLayer
from worker.models.architectures.stablelm import StableLmForCausalLM
from worker.models.layers.attention import MLP
from worker.models.layers.norms import LayerNorm


class NemotronForCausalLM(StableLmForCausalLM):
    """Nemotron 4: norms multiply by 1 + weight, and an MLP of two projections around a squared
    ReLU."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Builds a layer; all layers have the same structure."""
        return LlamaLayer(self, index, MLP(self.config, self.options, squared_relu))

    def build_norm(self) -> LayerNorm:
        """A LayerNorm with a bias, to whose weights in a checkpoint 1 is added."""
        config = self.config
        return LayerNorm(
            *(config.hidden_size, config.rms_norm_eps, self.options), has_bias=True, offset=1.0
        )
