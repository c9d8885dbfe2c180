"""Pre-norm decoders whose norms subtract the mean and have biases: StableLM 2
(huggingface.co/stabilityai), Orion (huggingface.co/OrionStarAI), Starcoder 2
(huggingface.co/bigcode), Nemotron 4 and Minitron (huggingface.co/nvidia)."""

from __future__ import annotations

import torch

from kernels import squared_relu
from worker.models.decoder import DecoderModel
from worker.models.layers import MLP, GatedMLP
from worker.models.llama import LlamaLayer
from worker.models.norms import LayerNorm


class StableLmForCausalLM(DecoderModel):
    """Llama's blocks behind these norms. A quarter of each head rotates, in Orion all of it."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Every layer is alike."""
        return LlamaLayer(self, index, GatedMLP(self.config, self.options))

    def build_norm(self) -> LayerNorm:
        """A LayerNorm with a bias."""
        config = self.config
        return LayerNorm(config.hidden_size, config.rms_norm_eps, self.options, has_bias=True)


class Starcoder2ForCausalLM(StableLmForCausalLM):
    """All projections have biases; nothing gates the MLP."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Every layer is alike."""
        names = {"up_name": "c_fc", "down_name": "c_proj"}
        return LlamaLayer(self, index, MLP(self.config, self.options, gelu_tanh, **names))


class NemotronForCausalLM(StableLmForCausalLM):
    """Weights of norms count from 1; the MLP squares what is positive."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Every layer is alike."""
        return LlamaLayer(self, index, MLP(self.config, self.options, squared_relu))

    def build_norm(self) -> LayerNorm:
        """A checkpoint holds its weight less 1."""
        config = self.config
        return LayerNorm(
            *(config.hidden_size, config.rms_norm_eps, self.options), has_bias=True, offset=1.0
        )


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by its approximation with tanh, of each element."""
    return torch.nn.functional.gelu(x, approximate="tanh")
