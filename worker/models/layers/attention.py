"""Attention and MLP blocks shared by most model families."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import ClassVar

import torch

from kernels import (
    SILU,
    Activation,
    Fp8Inputs,
    HeadNorms,
    activate_fp8,
    qk_norm_rope_store,
    rowwise,
)
from kernels.attention import AttentionStep
from worker.models.config.model_config import ModelConfig
from worker.models.layers.cache_scales import CacheScales
from worker.models.layers.context import AttentionInputs, ForwardContext, KVCache
from worker.models.layers.kv_cache import KVCacheSpec, StateSpec
from worker.models.layers.linear import (
    ColumnParallelLinear,
    ColumnPart,
    RowParallelLinear,
    Rows,
    divided_part,
)
from worker.models.layers.linear_method import LayerOptions, WeightSlot
from worker.models.layers.norms import RMSNorm
from worker.models.layers.sharing import divide, local_heads
from worker.models.layers.wide_norm import WideQueryKeyNorm


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionNames:
    """Names of the weights of an attention block in a checkpoint."""

    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    output: str = "o_proj"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    gate: str = ""
    """Projection for the gate of the attention output; empty if there is no gate, or if the query
    projection also computes it."""
    sinks: str = "sinks"
    is_fused: bool = False
    """Whether q, k and v are one tensor whose rows are in this order."""
    is_grouped: bool = False
    """Whether q, k and v are one tensor that holds, for each KV head, the rows of its query heads,
    its key and its value."""
    num_groups: int = 0
    """Number of head groups in a grouped tensor that is quantized group by group, so that scale
    blocks restart in each group; 0 if it is quantized as a whole, with one group per KV head."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionTraits:
    """How an attention block differs from Llama's."""

    names: AttentionNames = AttentionNames()
    """Names of the block's weights in a checkpoint."""
    scale: float | None = None
    """Factor applied to attention scores; None for head_dim ** -0.5."""
    rotates: bool = True
    """Whether queries and keys have rotary embedding."""
    is_interleaved: bool = False
    """Whether rotary embedding pairs adjacent dimensions (GPT-J style) instead of the two halves
    (NeoX style)."""
    query_scale: torch.Tensor | None = None
    """Factors applied to queries, by position, fp32 [positions]; None if queries are not scaled."""
    has_wide_norms: bool = False
    """Whether QK norm is over all heads together instead of each head."""
    has_sinks: bool = False
    """Whether each head has an attention sink."""
    norm_offset: float = 0.0
    """Offset added to the checkpoint's QK norm weights."""
    rotates_first: bool = False
    """Whether QK norm is applied after rotary embedding instead of before."""
    has_gate: bool = False
    """Whether the attention output is gated by additional output features of the query projection,
    or by `AttentionNames.gate`."""
    gates_heads: bool = False
    """Whether the gate, which has a separate projection, has one feature per head."""
    gate: Callable[[torch.Tensor], torch.Tensor] = rowwise.sigmoid
    """Activation of the gate."""
    has_unit_heads: bool = False
    """Whether each head of q and k is normalized without a weight after rotary embedding."""
    values_are_keys: bool = False
    """Whether the keys, before QK norm and rotary embedding, are reused as values."""
    has_value_norm: bool = False
    """Whether each head of the values is normalized without a weight."""
    value_factor: float = 1.0
    """Factor applied to values."""


class Attention:
    """Grouped-query attention with a paged KV cache and rotary embedding.

    Each rank computes its share of the query heads. If there are more ranks than KV heads, adjacent
    ranks hold copies of the same KV head.

    Args:
        config: the layer's configuration (`ModelConfig.for_layer`).
        options: options of the model's layers.
        layer_index: 0-based index of the layer.
        cos_sin: rotary table [positions, rotary_dim].
        window: sliding window: number of positions that a query attends to, including its own; 0
            for full attention.
        traits: how the block differs from Llama's attention.
        input_size: size of the input; 0 for the hidden size.
    """

    def __init__(
        self,
        config: ModelConfig,
        options: LayerOptions,
        *,
        layer_index: int,
        cos_sin: torch.Tensor,
        window: int = 0,
        traits: AttentionTraits,
        input_size: int = 0,
    ) -> None:
        head_dim, value_dim = config.head_dim, config.value_dim or config.head_dim
        num_heads, num_kv_heads = local_heads(config, options.group.world_size)
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.kv_cache_spec: KVCacheSpec | None = KVCacheSpec(
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=options.cache_dtype or options.dtype,
            window=window,
            is_chunked=bool(window and config.has_chunks),
            own_value_dim=config.value_dim or 0,
        )
        """Specification of the layer's KV cache."""
        self.state_spec: StateSpec | None = None
        """None, since attention keeps no state."""
        assert traits.has_gate or not traits.names.gate, "a gate name requires a gate"
        self._query_parts = 2 if traits.has_gate and not traits.names.gate else 1
        assert traits.has_value_norm or not traits.values_are_keys, (
            "values that are keys require a norm"
        )
        kept = (head_dim,) if traits.values_are_keys else (head_dim, value_dim)
        self._widths = [
            self._query_parts * num_heads * head_dim,
            *(num_kv_heads * size for size in kept),
        ]
        """Numbers of output features of q, k, v and the gate."""
        if traits.names.gate:
            assert len(kept) == 2, "gates come after the values"
            self._widths.append(num_heads * (1 if traits.gates_heads else value_dim))
        self._head_dim, self._value_dim = head_dim, value_dim
        self._hidden_size = config.hidden_size
        self._scale = head_dim**-0.5 if traits.scale is None else traits.scale
        self._traits = traits
        self._rotary_dim = config.rotary_dim
        self._layer_index = layer_index
        self._cos_sin = cos_sin
        self._names = traits.names
        self.cache_scales = CacheScales(
            options,
            keys=(f"{traits.names.k}.k_scale", "k_scale", "kv_scale"),
            values=(f"{traits.names.v}.v_scale", "v_scale", "kv_scale"),
        )
        self.qkv = ColumnParallelLinear(
            input_size or config.hidden_size,
            _qkv_parts(config, options, traits, self._query_parts),
            bias=config.qkv_bias,
            options=options,
            supports_lora=True,
        )
        self.output = RowParallelLinear(
            config.num_heads * value_dim,
            config.hidden_size,
            bias=config.output_bias,
            options=options,
            supports_lora=True,
        )
        self._sinks: torch.Tensor | None = None
        if traits.has_sinks:
            self._sinks = torch.empty(num_heads, dtype=torch.float32, device=options.device)
            self._first_head, self._all_heads = options.group.rank * num_heads, config.num_heads
        self._create_norms(config, options, traits)

    def _create_norms(
        self, config: ModelConfig, options: LayerOptions, traits: AttentionTraits
    ) -> None:
        """Builds the norms of queries and keys, if any."""
        assert config.qk_norm or not traits.has_value_norm, "value norm requires QK norm"
        self._unit_norm: RMSNorm | None = None
        if traits.has_unit_heads:
            self._unit_norm = _weightless_norm(config, options)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        self.wide_norm: WideQueryKeyNorm | None = None
        if traits.has_wide_norms:
            self.wide_norm = WideQueryKeyNorm(
                *(config, options), (traits.names.q_norm, traits.names.k_norm)
            )
        elif config.qk_norm:
            assert not traits.is_interleaved, "interleaved rotary embedding reorders the norms"
            self.q_norm, self.k_norm = (
                RMSNorm(self._head_dim, config.rms_norm_eps, options, traits.norm_offset)
                for _ in range(2)
            )

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of all projections, norms and sinks; `prefix` ends with a dot."""
        yield from self.qkv.weight_slots(prefix)
        yield from self.output.weight_slots(f"{prefix}{self._names.output}")
        if self.q_norm is not None and self.k_norm is not None:
            yield from self.q_norm.weight_slots(f"{prefix}{self._names.q_norm}")
            yield from self.k_norm.weight_slots(f"{prefix}{self._names.k_norm}")
        if self._sinks is not None:
            yield WeightSlot(
                name=f"{prefix}{self._names.sinks}",
                destination=self._sinks,
                full_shape=(self._all_heads,),
                start=self._first_head,
            )
        if self.wide_norm is not None:
            yield from self.wide_norm.weight_slots(prefix)
        yield from self.cache_scales.weight_slots(prefix)

    def process_after_loading(self) -> None:
        """Packs the projections after loading; reorders those with interleaved rotary
        dimensions."""
        if self._traits.is_interleaved:
            self.qkv.reorder(self._halves_first())
        self.qkv.process_after_loading()
        self.output.process_after_loading()
        self.cache_scales.process_after_loading()

    def drop(self) -> None:
        """Drops the loaded projections after the compiled CPU library has packed them."""
        self.qkv.drop()
        self.output.drop()

    @property
    def fp8_inputs(self) -> Fp8Inputs | None:
        """FP8 input format that `forward` supports; None if it only accepts unquantized rows."""
        return self.qkv.fp8_inputs

    def forward(
        self,
        hidden: Rows,
        positions: torch.Tensor,
        ctx: ForwardContext,
        logits_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Maps inputs [T, hidden] to outputs [T, hidden], or [S, hidden] for the tokens in
        `logits_indices`. Writes the keys and values of all tokens to the cache."""
        projected = self.qkv.forward(hidden)
        num_tokens, size = len(projected), self._head_dim
        first, second, *rest = projected.split(self._widths, dim=1)
        q, k = first.view(num_tokens, -1, size), second.view(num_tokens, -1, size)
        v = rest[0].view(num_tokens, -1, self._value_dim) if rest else k
        gate: torch.Tensor | None = None
        if self._names.gate:
            gate = rest[1]
        elif self._traits.has_gate:
            q, gate = q.unflatten(1, (self.num_heads, 2)).unbind(2)
        if self.wide_norm is not None:
            q, k = self.wide_norm.forward(q, k)
        cache, scales = ctx.kv_caches[self._layer_index], self.cache_scales
        q = qk_norm_rope_store(
            *(q, k, v, (cache.k, cache.v), ctx.attention[self._layer_index].slot_mapping),
            positions=positions,
            cos_sin_cache=self._cos_sin if self._traits.rotates else None,
            norms=self._head_norms(),
            query_scale=self._traits.query_scale,
            cache_scales=(scales.key, scales.value),
        )
        if logits_indices is not None and not len(logits_indices):
            return q.new_empty(0, self._hidden_size)
        attended = attend(
            *(q, cache, ctx, self._layer_index),
            scale=self._scale * scales.key,
            sinks=self._sinks,
            value_scale=scales.value * self._traits.value_factor,
        ).flatten(1)
        if gate is not None:
            attended = self._gated(attended, gate.flatten(1))
        return self.output.forward(
            attended if logits_indices is None else attended.index_select(0, logits_indices)
        )

    def _head_norms(self) -> HeadNorms | None:
        """The norms over each head of q, k and v; None if there are none."""
        if self._unit_norm is not None:
            weight = self._unit_norm.weight
            return HeadNorms(weight, weight, self._unit_norm.eps, after_rotation=True)
        if self.q_norm is None or self.k_norm is None:
            return None
        weights, traits = (self.q_norm.weight, self.k_norm.weight), self._traits
        return HeadNorms(
            *(*weights, self.q_norm.eps), traits.rotates_first, of_values=traits.has_value_norm
        )

    def _gated(self, attended: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """The attention output [T, N] times the activation of its gate, [T, N] or [T, heads]."""
        factor = self._traits.gate(gate)
        if not self._traits.gates_heads:
            return attended * factor
        return (attended.view(*gate.shape, -1) * factor.unsqueeze(2)).flatten(1)

    def _halves_first(self) -> torch.Tensor:
        """Row order of q, k and v that splits interleaved pairs of rotary dimensions into two
        halves. Scores do not change, since q and k are reordered identically."""
        width = self._rotary_dim
        head = torch.arange(self._head_dim)
        head[:width] = torch.arange(width).view(-1, 2).T.flatten()
        rows = torch.arange(sum(self._widths))
        rotating = rows[: sum(self._widths[:2])].view(-1, self._head_dim)
        rotating.copy_(rotating[:, head])
        return rows


def _weightless_norm(config: ModelConfig, options: LayerOptions) -> RMSNorm:
    """A norm over a head; its weights are all 1 and are not loaded from a checkpoint."""
    norm = RMSNorm(config.head_dim, config.rms_norm_eps, options)
    norm.weight.fill_(1.0)
    return norm


def attend(
    q: torch.Tensor,
    cache: KVCache,
    ctx: ForwardContext,
    layer_index: int,
    *,
    scale: float,
    sinks: torch.Tensor | None = None,
    value_scale: float = 1.0,
) -> torch.Tensor:
    """Attention output [T, heads, value_dim] of queries q [T, heads, head_dim] over one layer's KV
    cache; other arguments are as in `AttentionStep.forward`."""
    return attend_to_rows(
        *(q, cache, ctx.attention[layer_index], ctx.num_decode_tokens),
        scale=scale,
        sinks=sinks,
        value_scale=value_scale,
    )


def attend_to_rows(
    q: torch.Tensor,
    cache: KVCache,
    inputs: AttentionInputs,
    num_decodes: int,
    *,
    scale: float,
    sinks: torch.Tensor | None = None,
    value_scale: float = 1.0,
) -> torch.Tensor:
    """Attention of the rows planned in `inputs` over one layer's KV cache. The first `num_decodes`
    rows are decodes; other arguments are as in `attend`."""

    def forward(step: AttentionStep, q: torch.Tensor) -> torch.Tensor:
        return step.forward(q, cache.k, cache.v, scale=scale, sinks=sinks, value_scale=value_scale)

    decode, extend, canvases = inputs.decode, inputs.extend, inputs.canvases
    found: list[torch.Tensor] = []
    if canvases is not None:
        border = len(q) - inputs.num_canvas_tokens
        found, q = [forward(canvases, q[border:])], q[:border]
    if decode is not None and extend is not None:
        found = [forward(decode, q[:num_decodes]), forward(extend, q[num_decodes:]), *found]
    elif (known := extend if decode is None else decode) is not None:
        found = [forward(known, q), *found]
    assert found, "a step must have rows"
    return found[0] if len(found) == 1 else torch.cat(found)


class MLP:
    """Ungated MLP: down(activate(up(x))).

    Args:
        config: the model's configuration.
        options: options of the model's layers.
        activate: activation, which maps [T, size] to [T, size].
        up_name: name of the first projection in a checkpoint.
        down_name: name of the second projection in a checkpoint.
    """

    needs_fp32: ClassVar[bool] = False

    def __init__(
        self,
        config: ModelConfig,
        options: LayerOptions,
        activate: Callable[[torch.Tensor], torch.Tensor],
        *,
        up_name: str = "up_proj",
        down_name: str = "down_proj",
    ) -> None:
        self._activate = activate
        self._down_name = down_name
        size, bias = config.intermediate_size, config.mlp_bias
        divide(size, options.group.world_size, "the intermediate size")
        parts = [divided_part(up_name, size, options)]
        self.up = ColumnParallelLinear(
            config.hidden_size, parts, bias=bias, options=options, supports_lora=True
        )
        self.down = RowParallelLinear(
            size, config.hidden_size, bias=bias, options=options, supports_lora=True
        )

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of both projections; `prefix` ends with a dot."""
        yield from self.up.weight_slots(prefix)
        yield from self.down.weight_slots(f"{prefix}{self._down_name}")

    def process_after_loading(self) -> None:
        """Packs the projections after loading."""
        self.up.process_after_loading()
        self.down.process_after_loading()

    @property
    def fp8_inputs(self) -> Fp8Inputs | None:
        """FP8 input format that `forward` supports; None if it only accepts unquantized rows."""
        return self.up.fp8_inputs

    def forward(self, hidden: Rows, fp32_input: torch.Tensor | None = None) -> torch.Tensor:
        """Maps inputs [T, hidden] to outputs [T, hidden]."""
        return self.down.forward(self._activate(self.up.forward(hidden)))


FUSED_NAMES = ("gate_up_proj", "gate_up_proj", "down_proj")
"""Names of `GatedMLP` if gate and up are one tensor in the checkpoint."""


class GatedMLP:
    """Gated MLP: down(silu(gate(x)) * up(x)), or with another activation of the gate.

    Args:
        config: the model's configuration.
        options: options of the model's layers.
        size: intermediate size; 0 for the configuration's size.
        activate: gated activation, which maps gate and up [T, 2 * size] to [T, size]. An
            `Activation` is fused with the quantization of its result if `down` reads FP8 rows.
        names: names of gate, up and down in a checkpoint; gate and up have the same name if they
            are one tensor.
    """

    needs_fp32: ClassVar[bool] = False

    def __init__(
        self,
        config: ModelConfig,
        options: LayerOptions,
        size: int = 0,
        *,
        activate: Callable[[torch.Tensor], torch.Tensor] = SILU,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        self._activate = activate
        self._activates_fp8: tuple[Activation, Fp8Inputs] | None = None
        """The activation and the FP8 format in which `down` reads its result; None if the result is
        not quantized, or the weights are not packed yet."""
        *gate_and_up, self._down_name = names
        bias = config.mlp_bias
        size = size or config.intermediate_size
        self.size = divide(size, options.group.world_size, "the intermediate size")
        """Intermediate size on this rank."""
        self.gate_up = ColumnParallelLinear(
            config.hidden_size,
            _gate_up_parts(size, options, gate_and_up),
            bias=bias,
            options=options,
            supports_lora=True,
        )
        self.down = RowParallelLinear(
            size, config.hidden_size, bias=bias, options=options, supports_lora=True
        )

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of all projections; `prefix` ends with a dot."""
        yield from self.gate_up.weight_slots(prefix)
        yield from self.down.weight_slots(f"{prefix}{self._down_name}")

    def process_after_loading(self) -> None:
        """Packs the projections after loading."""
        self.gate_up.process_after_loading()
        self.down.process_after_loading()
        if isinstance(self._activate, Activation) and self.down.fp8_inputs is not None:
            self._activates_fp8 = self._activate, self.down.fp8_inputs

    def drop(self) -> None:
        """Drops the loaded projections after the compiled CPU library has packed them."""
        self.gate_up.drop()
        self.down.drop()

    @property
    def fp8_inputs(self) -> Fp8Inputs | None:
        """FP8 input format that `forward` supports; None if it only accepts unquantized rows."""
        return self.gate_up.fp8_inputs

    def forward(self, hidden: Rows, fp32_input: torch.Tensor | None = None) -> torch.Tensor:
        """Maps inputs [T, hidden] to outputs [T, hidden]."""
        return self.down.forward(self._activated(self.gate_up.forward(hidden)))

    def forward_share(self, hidden: Rows) -> torch.Tensor:
        """This rank's partial output [T, hidden] for inputs [T, hidden], before the all-reduce."""
        return self.down.forward_share(self._activated(self.gate_up.forward(hidden)))

    def _activated(self, both: torch.Tensor) -> Rows:
        """Input of `down`, from gate and up [T, 2 * size]."""
        if self._activates_fp8 is not None and len(both) >= self._activates_fp8[1].min_rows:
            activation, inputs = self._activates_fp8
            return activate_fp8(both, activation, by_block=inputs.by_block)
        return self._activate(both)


def _gate_up_parts(size: int, options: LayerOptions, names: Sequence[str]) -> list[ColumnPart]:
    """This rank's output features of gate and up."""
    parts = [divided_part(name, size, options) for name in names]
    if len(set(names)) > 1:
        return parts
    return [
        replace(part, full_size=2 * size, start=index * size + part.start)
        for index, part in enumerate(parts)
    ]


def _qkv_parts(
    config: ModelConfig, options: LayerOptions, traits: AttentionTraits, query_parts: int
) -> list[ColumnPart]:
    """This rank's heads of q, k, v (unless keys are reused as values), and of a gate with its own
    projection. A head of q has `query_parts` times its features: two if it includes a gate."""
    names = traits.names
    if names.is_grouped:
        assert query_parts == 1, "grouped tensors do not support gates"
        assert not traits.values_are_keys, "grouped tensors include values"
        assert not names.gate, "grouped tensors do not support gates"
        return _grouped_parts(config, options, names)
    num_heads, num_kv_heads = local_heads(config, options.group.world_size)
    first_kv_head = options.group.rank * config.num_kv_heads // options.group.world_size
    value_dim = config.value_dim or config.head_dim

    def part(name: str, kind: tuple[int, int, int], width: int) -> ColumnPart:
        full, local, first = (count * width for count in kind)
        return ColumnPart(name=name, full_size=full, local_size=local, start=first)

    queries = config.num_heads, num_heads, options.group.rank * num_heads
    keys = config.num_kv_heads, num_kv_heads, first_kv_head
    parts = [
        part(names.q, queries, query_parts * config.head_dim),
        part(names.k, keys, config.head_dim),
        part(names.v, keys, value_dim),
    ]
    if names.is_fused:
        ends = list(accumulate(part.full_size for part in parts))
        parts = [
            replace(part, full_size=ends[-1], start=part.start + first)
            for part, first in zip(parts, [0, *ends], strict=False)
        ]
    if names.gate:
        parts.append(part(names.gate, queries, 1 if traits.gates_heads else value_dim))
    return parts[:2] if traits.values_are_keys else parts


def _grouped_parts(
    config: ModelConfig, options: LayerOptions, names: AttentionNames
) -> list[ColumnPart]:
    """This rank's heads of a tensor with the heads of q, k and v in groups
    (`AttentionNames.is_grouped`)."""
    num_heads, num_kv_heads = local_heads(config, options.group.world_size)
    first_head = options.group.rank * num_heads
    first_kv_head = options.group.rank * config.num_kv_heads // options.group.world_size
    num_groups = names.num_groups or config.num_kv_heads
    per_group, kv_per_group = config.num_heads // num_groups, config.num_kv_heads // num_groups
    head_dim, value_dim = config.head_dim, config.value_dim or config.head_dim
    starts = [0, per_group * head_dim, (per_group + kv_per_group) * head_dim]
    """Indices of the first features of q, k and v in a group."""
    size = starts[2] + kv_per_group * value_dim
    parts = []
    for start, width, heads, first, each in (
        (starts[0], head_dim, num_heads, first_head, per_group),
        (starts[1], head_dim, num_kv_heads, first_kv_head, kv_per_group),
        (starts[2], value_dim, num_kv_heads, first_kv_head, kv_per_group),
    ):
        for group in range(first // each, -(-(first + heads) // each)):
            begin, end = max(first, group * each), min(first + heads, (group + 1) * each)
            part = ColumnPart(
                name=names.q,
                full_size=num_groups * size,
                local_size=(end - begin) * width,
                start=group * size + start + (begin - group * each) * width,
                section=size if names.num_groups else 0,
            )
            parts.append(part)
    return parts
