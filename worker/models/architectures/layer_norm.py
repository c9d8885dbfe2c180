"""Decoders with LayerNorm with bias before each block: StableLM 2 (huggingface.co/stabilityai),
Orion (huggingface.co/OrionStarAI), Starcoder 2 (huggingface.co/bigcode), Nemotron 4 and Minitron
(huggingface.co/nvidia)."""

from __future__ import annotations

from kernels import rowwise, squared_relu
from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.llama import LlamaLayer
from worker.models.layers.attention import MLP, GatedMLP
from worker.models.layers.norms import LayerNorm


class StableLmForCausalLM(DecoderModel):
    """StableLM 2 and Orion: Llama's blocks with LayerNorm. StableLM has rotary embedding of a
    quarter of each head."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Builds a layer; all are alike."""
        return LlamaLayer(self, index, GatedMLP(self.config, self.options))

    def build_norm(self) -> LayerNorm:
        """A LayerNorm with a bias."""
        config = self.config
        return LayerNorm(config.hidden_size, config.rms_norm_eps, self.options, has_bias=True)


class Starcoder2ForCausalLM(StableLmForCausalLM):
    """Starcoder 2: biases in all projections, and an MLP without a gate."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Builds a layer; all are alike."""
        names = {"up_name": "c_fc", "down_name": "c_proj"}
        return LlamaLayer(self, index, MLP(self.config, self.options, rowwise.gelu_tanh, **names))


class NemotronForCausalLM(StableLmForCausalLM):
    """Nemotron 4: norms multiply by 1 + weight, and an MLP of two projections around a squared
    ReLU."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Builds a layer; all are alike."""
        return LlamaLayer(self, index, MLP(self.config, self.options, squared_relu))

    def build_norm(self) -> LayerNorm:
        """A LayerNorm with a bias, to whose weights in a checkpoint 1 is added."""
        config = self.config
        return LayerNorm(
            *(config.hidden_size, config.rms_norm_eps, self.options), has_bias=True, offset=1.0
        )
