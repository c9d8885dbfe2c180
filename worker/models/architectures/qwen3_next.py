"""Qwen3-Next, Qwen3.5 and 3.6 (huggingface.co/Qwen): three out of four layers use linear attention
(gated delta net, arXiv 2412.06464); the others use gated attention.

Schema: `config/vendors/qwen.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import torch

from kernels import Fp8Inputs
from kernels.gated_delta_rule import DeltaLayer, gated_delta_net
from kernels.states import Inputs, StateRows, advance_with_drafts
from worker.models.architectures.decoder import DecoderModel, FeedForward
from worker.models.architectures.llama import LlamaLayer, PreNormLayer
from worker.models.architectures.qwen3_moe import Qwen2MoeForCausalLM
from worker.models.layers.attention import AttentionTraits, GatedMLP
from worker.models.layers.context import ForwardContext
from worker.models.layers.kv_cache import KVCacheSpec, StatePlane, StateSpec
from worker.models.layers.linear import (
    ColumnParallelLinear,
    ColumnPart,
    RowParallelLinear,
    Rows,
)
from worker.models.layers.linear_method import WeightSlot
from worker.models.layers.norms import RMSNorm
from worker.models.layers.sharing import divide


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaTraits:
    """How a gated delta net differs from Qwen3.5's: tensor names and computation."""

    is_fused: bool = False
    """Whether a checkpoint has all projections in two tensors, grouped by key head."""
    projections: tuple[tuple[str, str], ...] = (
        ("in_proj_qkv", "qkv"),
        ("in_proj_z", "z"),
        ("in_proj_b", "b"),
        ("in_proj_a", "a"),
    )
    """Names of the projections, and what each holds: queries, keys, values, gates (z), step sizes
    (b) and decays (a), in this order."""
    convolutions: tuple[tuple[str, str], ...] = (("conv1d", "qkv"),)
    """Names of the convolution's tensors, and what each holds, in the same order."""
    output: str = "out_proj"
    norm: str = "norm"
    norm_eps: float | None = None
    """Epsilon of the output norm; None for the model's epsilon."""
    share_scale: float = 1.0
    """Factor applied to step sizes (`DeltaLayer.share_scale`)."""


class GatedDeltaNet:
    """Gated delta net, a linear attention: a short convolution over queries, keys and values, then
    the delta rule.

    Each rank computes its share of the key heads and the value heads that use them.

    Args:
        model: the model that the layer belongs to.
        index: 0-based index of the layer.
        traits: how the layer differs from Qwen3.5's.

    Raises:
        ValueError: the heads cannot be split evenly across the ranks, or the number of value heads
            is not a multiple of the number of key heads.
    """

    def __init__(self, model: DecoderModel, index: int, traits: DeltaTraits) -> None:
        config, options = model.config, model.options
        world_size = options.group.world_size
        all_keys = int(model.extra("linear_num_key_heads"))
        all_values = int(model.extra("linear_num_value_heads"))
        if all_values % all_keys:
            raise ValueError(
                f"linear_num_value_heads {all_values} in config.json is not a multiple of "
                f"linear_num_key_heads ({all_keys}): make them consistent"
            )
        self._ratio = all_values // all_keys
        self._key_heads = divide(all_keys, world_size, "the number of linear key heads")
        self._value_heads = self._key_heads * self._ratio
        self._key_dim = int(model.extra("linear_key_head_dim"))
        self._value_dim = int(model.extra("linear_value_head_dim"))
        self._num_taps = int(model.extra("linear_conv_kernel_dim"))
        self._layer_index = index
        self._options = options
        self._traits = traits
        keys, values = self._key_heads * self._key_dim, self._value_heads * self._value_dim
        self._widths = [keys, keys, values, values, self._value_heads, self._value_heads]
        """Widths of q, k, v, z, b and a on this rank, in the order of the projection's output."""
        self.kv_cache_spec: KVCacheSpec | None = None
        """None, since linear attention keeps no keys and values."""
        self.state_spec: StateSpec | None = StateSpec(
            planes=(
                StatePlane((self._num_taps - 1, 2 * keys + values), options.dtype),
                StatePlane((self._value_heads, self._key_dim, self._value_dim), torch.float32),
            ),
            inputs=(StatePlane((sum(self._widths),), options.dtype),),
        )
        """Specification of the layer's state per request: last inputs of the convolution, and the
        recurrent state. The recurrence's inputs are the projections."""
        self._projection = ColumnParallelLinear(
            config.hidden_size, self._parts(), bias=False, options=options, supports_lora=True
        )
        self._output = RowParallelLinear(
            world_size * values, config.hidden_size, bias=False, options=options, supports_lora=True
        )
        self._conv = torch.empty(
            2 * keys + values, self._num_taps, dtype=options.dtype, device=options.device
        )
        self._decay, self._step_bias = (
            torch.empty(self._value_heads, dtype=torch.float32, device=options.device)
            for _ in range(2)
        )
        eps = config.rms_norm_eps if traits.norm_eps is None else traits.norm_eps
        self._norm = RMSNorm(self._value_dim, eps, options)
        self._layer: DeltaLayer | None = None

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of the projections, the convolution, the decay and the norm; `prefix` ends
        with a dot."""
        yield from self._projection.weight_slots(prefix)
        yield from self._output.weight_slots(f"{prefix}{self._traits.output}")
        yield from self._norm.weight_slots(f"{prefix}{self._traits.norm}")
        group, rows = self._options.group, iter(self._conv.split(self._widths[:3]))
        for name, kinds in self._traits.convolutions:
            for part in self._parts_of(name, kinds):
                yield WeightSlot(
                    name=f"{prefix}{name}.weight",
                    destination=next(rows).unsqueeze(1),
                    full_shape=(part.full_size, 1, self._num_taps),
                    start=part.start,
                )
        for name, heads in (("A_log", self._decay), ("dt_bias", self._step_bias)):
            yield WeightSlot(
                name=f"{prefix}{name}",
                destination=heads,
                full_shape=(self._value_heads * group.world_size,),
                start=group.rank * self._value_heads,
            )

    def process_after_loading(self) -> None:
        """Packs the projections after loading (reordering fused ones) and transposes the weights of
        the convolution."""
        if self._traits.is_fused:
            self._projection.reorder(self._by_kind())
        self._projection.process_after_loading()
        self._output.process_after_loading()
        self._layer = DeltaLayer(
            conv=torch.stack(self._conv.unbind(1)),
            log_rate=self._decay,
            step_bias=self._step_bias,
            norm=self._norm.weight,
            eps=self._norm.eps,
            num_key_heads=self._key_heads,
            key_dim=self._key_dim,
            share_scale=self._traits.share_scale,
        )

    @property
    def fp8_inputs(self) -> Fp8Inputs | None:
        """FP8 input format that `forward` supports; None if it only accepts unquantized rows."""
        return self._projection.fp8_inputs

    def forward(
        self,
        hidden: Rows,
        positions: torch.Tensor,
        ctx: ForwardContext,
        logits_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Maps inputs [T, hidden] to outputs [T, hidden], or [S, hidden] for the tokens in
        `logits_indices`. Updates the states of all rows."""
        projected, layer = self._projection.forward(hidden), self._layer
        rows, states = ctx.state_rows, ctx.states[self._layer_index]
        assert layer is not None, "weights are loaded"
        assert rows is not None, "a step of a model that keeps states"

        def advance(inputs: Inputs, rows: StateRows) -> torch.Tensor:
            by_position = self._options.batch_invariant
            return gated_delta_net(inputs[0], layer, states, rows, by_position=by_position)

        out = advance_with_drafts([projected], states, rows, advance)
        return self._output.forward(
            out if logits_indices is None else out.index_select(0, logits_indices)
        )

    def _parts(self) -> list[ColumnPart]:
        """This rank's output features of all projections."""
        if self._traits.is_fused:
            return [
                self._joined_part("in_proj_qkvz", "qkvz"),
                self._joined_part("in_proj_ba", "ba"),
            ]
        named = self._traits.projections
        return [part for name, kinds in named for part in self._parts_of(name, kinds)]

    def _parts_of(self, name: str, kinds: str) -> list[ColumnPart]:
        """This rank's rows of a tensor that holds the features of all `kinds`, one kind after
        another."""
        group = self._options.group
        widths = [self._widths["qkvzba".index(kind)] for kind in kinds]
        starts = accumulate(widths, initial=0)
        return [
            ColumnPart(
                name=name,
                full_size=sum(widths) * group.world_size,
                local_size=width,
                start=start * group.world_size + group.rank * width,
            )
            for width, start in zip(widths, starts, strict=False)
        ]

    def _joined_part(self, name: str, kinds: str) -> ColumnPart:
        """This rank's rows of a tensor that holds all `kinds` of features, grouped by key head."""
        group = self._options.group
        width = sum(self._widths["qkvzba".index(kind)] for kind in kinds)
        return ColumnPart(
            name=name,
            full_size=width * group.world_size,
            local_size=width,
            start=group.rank * width,
        )

    def _by_kind(self) -> torch.Tensor:
        """Order of the projection's rows by kind: q of all key heads, then k, v, z, b and a. A
        fused checkpoint has q, k, v and z grouped by key head, then b and a grouped by key head."""
        num_heads = self._key_heads
        per_head = [width // num_heads for width in self._widths]
        wide, narrow = sum(per_head[:4]), sum(per_head[4:])
        rows = torch.arange(num_heads * (wide + narrow))
        first = rows[: num_heads * wide].view(num_heads, wide).split(per_head[:4], dim=1)
        second = rows[num_heads * wide :].view(num_heads, narrow).split(per_head[4:], dim=1)
        return torch.cat([part.flatten() for part in (*first, *second)])


class Qwen3NextForCausalLM(Qwen2MoeForCausalLM):
    """Qwen3-Next: linear and gated attention, routed experts and a shared expert; norms multiply by
    1 + weight."""

    norm_offset: ClassVar[float] = 1.0
    is_fused: ClassVar[bool] = True
    """Whether a checkpoint has the projections of a linear-attention layer in two tensors."""

    def build_layer(self, index: int) -> PreNormLayer:
        """Builds a layer with linear or gated attention."""
        mlp, linear = self.build_mlp(index), self.config.linear_layers
        if linear is not None and index in linear:
            mixer = GatedDeltaNet(self, index, DeltaTraits(is_fused=self.is_fused))
            return PreNormLayer(self, mixer, mlp, mixer_name="linear_attn")
        traits = AttentionTraits(norm_offset=self.norm_offset, has_gate=True)
        return LlamaLayer(self, index, mlp, traits=traits)


class Qwen35ForCausalLM(Qwen3NextForCausalLM):
    """Qwen3.5 and 3.6: projections of linear-attention layers are not fused, unlike in Qwen3-Next.
    Dense, or with experts."""

    is_fused: ClassVar[bool] = False

    def build_mlp(self, index: int) -> FeedForward:
        """Builds the feed-forward block of a layer: an MLP in a dense model, otherwise experts."""
        if self.config.moe is None:
            return GatedMLP(self.config, self.options)
        return super().build_mlp(index)
