"""Phi 1 to 2 (huggingface.co/microsoft): attention and an ungated MLP as parallel blocks
after one LayerNorm.

Schema: `config/vendors/microsoft.py`.
"""

from __future__ import annotations

from typing import ClassVar

from kernels import rowwise
from worker.models.architectures.cohere import ParallelLayer
from worker.models.architectures.stablelm import StableLmForCausalLM
from worker.models.layers.attention import MLP, AttentionNames, AttentionTraits

_PHI_NAMES = AttentionNames(output="dense")


class PhiForCausalLM(StableLmForCausalLM):
    """Phi 1 to 2: rotary embedding in part of each head; all projections and the LM head have
    biases."""

    norm_name: ClassVar[str] = "model.final_layernorm"
    head_has_bias: ClassVar[bool] = True

    def build_layer(self, index: int) -> ParallelLayer:
        """Builds a layer; all layers have the same structure."""
        mlp = MLP(self.config, self.options, rowwise.gelu_tanh, up_name="fc1", down_name="fc2")
        return ParallelLayer(self, index, mlp, traits=AttentionTraits(names=_PHI_NAMES))
