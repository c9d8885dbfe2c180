"""Step 3.5 and 3.7 (huggingface.co/stepfun-ai): attention with a gate per head, and clamped
experts.

Schema: `config/vendors/stepfun.py`.
"""

from __future__ import annotations

from typing import ClassVar

from kernels import SILU, Activation
from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.llama import LlamaLayer
from worker.models.layers.attention import AttentionNames, AttentionTraits, GatedMLP
from worker.models.layers.moe import MoeMLP, MoeNames

_NAMES = AttentionNames(gate="g_proj")
_MOE_NAMES = MoeNames(
    router="moe.gate",
    bias="moe.router_bias",
    experts="moe",
    stacks_projections=True,
    shared="share_expert",
)


class Step3p5ForCausalLM(DecoderModel):
    """Step 3.5: sliding-window and full-attention layers, which differ in query heads and rotary
    tables. Checkpoints store norm weights minus 1."""

    norm_offset: ClassVar[float] = 1.0

    def build_layer(self, index: int) -> LlamaLayer:
        """Builds a layer with experts or with an MLP."""
        moe, scalar = self.config.moe, self.extra("query_pre_attn_scalar")
        assert moe is not None, "the architecture has experts"
        traits = AttentionTraits(
            names=_NAMES,
            scale=None if scalar is None else float(scalar) ** -0.5,
            norm_offset=self.norm_offset,
            has_gate=True,
            gates_heads=True,
        )
        shared = self._activation("swiglu_limits_shared", index)
        if index in moe.dense_layers:
            mlp = GatedMLP(self.config, self.options, activate=shared)
            return LlamaLayer(self, index, mlp, traits=traits)
        experts = MoeMLP(
            *(self.config, self.options, _MOE_NAMES),
            activation=self._activation("swiglu_limits", index),
            shared_activation=shared,
        )
        return LlamaLayer(self, index, experts, traits=traits, mlp_name="")

    def _activation(self, key: str, index: int) -> Activation:
        """Activation of a layer's MLP or experts. Its limit is the layer's entry in the list `key`
        of config.json, which may have no entry for an MTP head."""
        limits = self.extra(key)
        limit = None if limits is None or index >= len(limits) else limits[index]
        return Activation("clamped silu", limit=float(limit)) if limit else SILU
