"""Falcon-H1 (huggingface.co/tiiuae): Mamba-2 and attention in parallel in all layers, and scaled
activations (muP).

Schema: `config/vendors/tii.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from kernels import silu_and_mul
from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.llama import PreNormLayer
from worker.models.layers.attention import Attention, AttentionTraits, GatedMLP
from worker.models.layers.context import ForwardContext
from worker.models.layers.linear_method import WeightSlot
from worker.models.layers.mamba import Mamba2


class ParallelMixer:
    """Mamba-2 and attention on the same input; their outputs are added.

    Args:
        model: the model that the layer belongs to.
        index: 0-based index of the layer.
    """

    def __init__(self, model: DecoderModel, index: int) -> None:
        config = model.config
        scale = config.head_dim**-0.5 * float(model.extra("key_multiplier"))
        self._mamba = Mamba2(config, model.options, index)
        self._attention = Attention(
            *(config, model.options),
            layer_index=index,
            cos_sin=model.rotary_table(index),
            traits=AttentionTraits(scale=scale),
        )
        self._input = float(model.extra("attention_in_multiplier"))
        self._outputs = [
            float(model.extra(key)) for key in ("ssm_out_multiplier", "attention_out_multiplier")
        ]
        self.kv_cache_spec = self._attention.kv_cache_spec
        """Specification of the attention's KV cache."""
        self.state_spec = self._mamba.state_spec
        """Specification of Mamba-2's state per request."""

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of Mamba-2 and attention; `prefix` is the layer's and ends with a dot."""
        yield from self._mamba.weight_slots(f"{prefix}mamba.")
        yield from self._attention.weight_slots(f"{prefix}self_attn.")

    def process_after_loading(self) -> None:
        """Packs Mamba-2 and attention after loading."""
        self._mamba.process_after_loading()
        self._attention.process_after_loading()

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        ctx: ForwardContext,
        logits_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Maps inputs [T, hidden] to outputs [T, hidden], or [S, hidden] for the tokens in
        `logits_indices`. Updates the states of all rows and writes keys and values to the cache."""
        scanned = self._mamba.forward(hidden, positions, ctx, logits_indices)
        attended = self._attention.forward(hidden * self._input, positions, ctx, logits_indices)
        return scanned * self._outputs[0] + attended * self._outputs[1]


class FalconH1Layer(PreNormLayer):
    """A layer with Mamba-2 and attention in parallel, with Falcon-H1's checkpoint names for the
    norms."""

    norm_names: ClassVar[tuple[str, ...]] = ("input_layernorm", "pre_ff_layernorm")


class FalconH1ForCausalLM(DecoderModel):
    """Falcon-H1, which also scales MLP gates and outputs, embeddings and logits."""

    norm_name: ClassVar[str] = "model.final_layernorm"

    def build_layer(self, index: int) -> FalconH1Layer:
        """Builds a layer; all layers have the same structure."""
        mlp = GatedMLP(self.config, self.options, activate=self._activate)
        mixer = ParallelMixer(self, index)
        return FalconH1Layer(self, mixer, mlp, mixer_name="", mlp_name="feed_forward")

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Maps token ids [T] to the first layer's input [T, hidden]."""
        return super().embed(input_ids) * float(self.extra("embedding_multiplier"))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Computes fp32 logits [R, vocab_size] from the hidden states [R, hidden] of the rows to
        sample."""
        return super().compute_logits(hidden) * float(self.extra("lm_head_multiplier"))

    def _activate(self, both: torch.Tensor) -> torch.Tensor:
        """Activation of the MLPs: maps gate and up [T, 2 * size] to [T, size]. The factor of the
        MLP's output is applied to `up`, since the projection in between is linear."""
        gate, up = both.chunk(2, dim=1)
        of_gate, of_output = map(float, self.extra("mlp_multipliers"))
        return silu_and_mul(torch.cat((gate * of_gate, up * of_output), dim=1))
