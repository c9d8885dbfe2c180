"""Nemotron 4 and Minitron (huggingface.co/nvidia), and Jais 2 (huggingface.co/inceptionai):
LayerNorm and an ungated MLP.

Schemas: `config/vendors/nvidia.py` and `config/vendors/inceptionai.py`.
"""

from __future__ import annotations

from kernels import squared_relu
from worker.models.architectures.llama import LlamaLayer
from worker.models.architectures.stablelm import StableLmForCausalLM
from worker.models.layers.attention import MLP
from worker.models.layers.norms import LayerNorm


class Jais2ForCausalLM(StableLmForCausalLM):
    """Jais 2: an MLP of two projections and a squared ReLU between them."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Builds a layer; all layers have the same structure."""
        return LlamaLayer(self, index, MLP(self.config, self.options, squared_relu))


class NemotronForCausalLM(Jais2ForCausalLM):
    """Nemotron 4: norms multiply by 1 + weight."""

    def build_norm(self) -> LayerNorm:
        """A LayerNorm with a bias; its weight is the checkpoint's plus 1."""
        config = self.config
        return LayerNorm(
            *(config.hidden_size, config.rms_norm_eps, self.options), has_bias=True, offset=1.0
        )
