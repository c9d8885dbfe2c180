"""LFM2 (huggingface.co/LiquidAI): short convolutions in most layers, attention in the others;
dense, or with experts.

Schema: `config/vendors/liquid.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from kernels import Fp8Inputs
from kernels.states import Inputs, StateRows, advance_with_drafts
from worker.models.architectures.decoder import DecoderModel, FeedForward
from worker.models.architectures.llama import LlamaLayer, PreNormLayer
from worker.models.layers.attention import AttentionNames, AttentionTraits, GatedMLP
from worker.models.layers.context import ForwardContext
from worker.models.layers.convolution import ChannelPart, ShortConvolution
from worker.models.layers.kv_cache import KVCacheSpec, StatePlane, StateSpec
from worker.models.layers.linear import (
    ColumnParallelLinear,
    ColumnPart,
    RowParallelLinear,
    Rows,
)
from worker.models.layers.linear_method import WeightSlot
from worker.models.layers.moe import MoeMLP, MoeNames
from worker.models.layers.sharing import divide

_NORMS = ("operator_norm", "ffn_norm")
_MLP_NAMES = ("w1", "w3", "w2")
_MOE_NAMES = MoeNames(bias="expert_bias", gate="w1", up="w3", down="w2")
_TRAITS = AttentionTraits(
    names=AttentionNames(output="out_proj", q_norm="q_layernorm", k_norm="k_layernorm")
)


class GatedConvolution:
    """A short convolution between two gates: out(c * conv(b * x)), where b, c and x are projections
    of the input. Each rank computes its share of the channels.

    Args:
        model: the model that the layer belongs to.
        index: 0-based index of the layer.
    """

    def __init__(self, model: DecoderModel, index: int) -> None:
        size, options = model.config.hidden_size, model.options
        world_size, rank = options.group.world_size, options.group.rank
        has_bias, num_taps = bool(model.extra("conv_bias")), int(model.extra("conv_L_cache"))
        local = divide(size, world_size, "the number of channels of convolutions")
        starts = [part * size + rank * local for part in range(3)]
        parts = [
            ColumnPart(name="in_proj", full_size=3 * size, local_size=local, start=start)
            for start in starts
        ]
        self._layer_index = index
        self._input = ColumnParallelLinear(
            size, parts, bias=has_bias, options=options, supports_lora=True
        )
        self._output = RowParallelLinear(
            size, size, bias=has_bias, options=options, supports_lora=True
        )
        channels = [ChannelPart(rank * local, local)]
        self._conv = ShortConvolution(
            *(channels, size, num_taps), has_bias=has_bias, has_silu=False, options=options
        )
        self.kv_cache_spec: KVCacheSpec | None = None
        """None, since a convolution keeps no keys and values."""
        self.state_spec: StateSpec | None = StateSpec(
            planes=(self._conv.plane,), inputs=(StatePlane((local,), options.dtype),)
        )
        """Specification of the state per request: last inputs of the convolution."""

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of the projections and the convolution; `prefix` ends with a dot."""
        yield from self._input.weight_slots(prefix)
        yield from self._conv.weight_slots(f"{prefix}conv")
        yield from self._output.weight_slots(f"{prefix}out_proj")

    def process_after_loading(self) -> None:
        """Packs the projections, and transposes the weights of the convolution."""
        self._input.process_after_loading()
        self._output.process_after_loading()
        self._conv.process_after_loading()

    @property
    def fp8_inputs(self) -> Fp8Inputs | None:
        """FP8 input format that `forward` supports; None if it only accepts unquantized rows."""
        return self._input.fp8_inputs

    def forward(
        self,
        hidden: Rows,
        positions: torch.Tensor,
        ctx: ForwardContext,
        logits_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Maps inputs [T, hidden] to outputs [T, hidden], or [S, hidden] for the tokens in
        `logits_indices`. Updates the states of all rows."""
        rows, states = ctx.state_rows, ctx.states[self._layer_index]
        assert rows is not None, "a step of a model that keeps states"
        b, c, x = self._input.forward(hidden).chunk(3, dim=1)

        def advance(inputs: Inputs, rows: StateRows) -> torch.Tensor:
            return self._conv.forward(inputs[0], states.conv, rows)

        out = c * advance_with_drafts([b * x], states, rows, advance)
        return self._output.forward(
            out if logits_indices is None else out.index_select(0, logits_indices)
        )


class ConvolutionLayer(PreNormLayer):
    """A layer with a short convolution, with LFM2's checkpoint names for the norms."""

    norm_names: ClassVar[tuple[str, ...]] = _NORMS


class AttentionLayer(LlamaLayer):
    """A layer with attention, with LFM2's checkpoint names for the norms."""

    norm_names: ClassVar[tuple[str, ...]] = _NORMS


class Lfm2ForCausalLM(DecoderModel):
    """Dense LFM2."""

    norm_name: ClassVar[str] = "model.embedding_norm"

    def build_layer(self, index: int) -> PreNormLayer:
        """Builds a layer with a short convolution or with attention."""
        mlp, name = self.build_mlp(index), "feed_forward"
        if index in (self.config.linear_layers or ()):
            mixer = GatedConvolution(self, index)
            return ConvolutionLayer(self, mixer, mlp, mixer_name="conv", mlp_name=name)
        return AttentionLayer(self, index, mlp, traits=_TRAITS, mlp_name=name)

    def build_mlp(self, index: int) -> FeedForward:
        """Builds the feed-forward block of a layer."""
        return GatedMLP(self.config, self.options, names=_MLP_NAMES)


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    """LFM2 with experts in all but the first few layers."""

    def build_mlp(self, index: int) -> FeedForward:
        """Builds the feed-forward block of a layer: experts, or an MLP in the first layers."""
        moe = self.config.moe
        assert moe is not None, "the architecture has experts"
        if index in moe.dense_layers:
            return super().build_mlp(index)
        return MoeMLP(self.config, self.options, _MOE_NAMES)
