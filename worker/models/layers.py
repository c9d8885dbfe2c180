"""Attention and feed-forward blocks that the architectures are put together from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kernels import (
    fused_add_rms_norm,
    rms_norm,
    rotary_embedding,
    silu_and_mul,
    store_kv_cache,
)
from worker.models.config import ModelConfig
from worker.models.context import ForwardContext
from worker.models.kv_cache import KVCacheSpec
from worker.models.linear import (
    ColumnParallelLinear,
    ColumnPart,
    RowParallelLinear,
    divide,
    divided_part,
)
from worker.models.linear_method import LayerOptions, WeightSlot


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionNames:
    """What a checkpoint calls the parts of an attention block."""

    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    output: str = "o_proj"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    is_fused: bool = False
    """Whether q, k and v are one tensor, their rows in this order."""


class RMSNorm:
    """Root-mean-square normalisation over the last dimension."""

    def __init__(self, size: int, eps: float, options: LayerOptions) -> None:
        self.weight = torch.empty(size, dtype=options.dtype, device=options.device)
        self._eps = eps

    def weight_slots(self, name: str) -> Iterator[WeightSlot]:
        """The slot of `name`.weight, whole on every rank."""
        yield WeightSlot(
            name=f"{name}.weight",
            destination=self.weight,
            full_shape=tuple(self.weight.shape),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] to [..., size]."""
        return rms_norm(x, self.weight, self._eps)

    def forward_add(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual)."""
        return fused_add_rms_norm(x, residual, self.weight, self._eps)


class Attention:
    """Paged attention with grouped query heads and rotary positions.

    Each rank computes its share of the query heads. Where there are more ranks than kv heads,
    neighbouring ranks hold copies of the same kv head.

    Args:
        config: of the model.
        options: of its layers.
        layer_index: from 0.
        cos_sin: the rotary table [positions, rotary_dim].
        window: positions that a query sees, its own included; 0 for all before it.
        scale: factor of the products of queries and keys; None for head_dim ** -0.5.
        names: what a checkpoint calls the parts; None for Llama's names.
    """

    def __init__(
        self,
        config: ModelConfig,
        options: LayerOptions,
        *,
        layer_index: int,
        cos_sin: torch.Tensor,
        window: int = 0,
        scale: float | None = None,
        names: AttentionNames | None = None,
    ) -> None:
        head_dim = config.head_dim
        num_heads, num_kv_heads = local_heads(config, options.group.world_size)
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.kv_cache_spec = KVCacheSpec(
            num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=options.dtype, window=window
        )
        """What it keeps of a token."""
        self._split = [num_heads, num_kv_heads, num_kv_heads]
        self._head_dim = head_dim
        self._scale = head_dim**-0.5 if scale is None else scale
        self._layer_index = layer_index
        self._cos_sin = cos_sin
        self._names = names or AttentionNames()
        self.qkv = ColumnParallelLinear(
            config.hidden_size,
            _qkv_parts(config, options, self._names),
            bias=config.qkv_bias,
            options=options,
        )
        self.output = RowParallelLinear(
            config.num_heads * head_dim,
            config.hidden_size,
            bias=config.output_bias,
            options=options,
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.q_norm = RMSNorm(head_dim, config.rms_norm_eps, options)
            self.k_norm = RMSNorm(head_dim, config.rms_norm_eps, options)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Slots of all projections; `prefix` ends with a dot."""
        yield from self.qkv.weight_slots(prefix)
        yield from self.output.weight_slots(f"{prefix}{self._names.output}")
        if self.q_norm is not None and self.k_norm is not None:
            yield from self.q_norm.weight_slots(f"{prefix}{self._names.q_norm}")
            yield from self.k_norm.weight_slots(f"{prefix}{self._names.k_norm}")

    def pack(self) -> None:
        """Packs the projections after loading."""
        self.qkv.pack()
        self.output.pack()

    def drop(self) -> None:
        """Lets go of the projections: others hold them now."""
        self.qkv.drop()
        self.output.drop()

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        ctx: ForwardContext,
        read: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, hidden] to [T, hidden], or to [S, hidden] of the tokens `read`; writes the keys and
        values of all tokens into the cache."""
        qkv = self.qkv.forward(hidden).view(hidden.shape[0], -1, self._head_dim)
        q, k, v = torch.split(qkv, self._split, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm.forward(q), self.k_norm.forward(k)
        rotary_embedding(q, k, positions, self._cos_sin)
        cache = ctx.kv_caches[self._layer_index]
        store_kv_cache(k, v, cache.k, cache.v, ctx.attention[self._layer_index].slot_mapping)
        if read is not None and not len(read):
            return hidden[:0]
        attended = self._attend(q, cache.k, cache.v, ctx).reshape(hidden.shape[0], -1)
        return self.output.forward(attended if read is None else attended.index_select(0, read))

    def _attend(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        inputs = ctx.attention[self._layer_index]
        decode, extend = inputs.decode, inputs.extend
        if extend is None:
            assert decode is not None, "a step has rows"
            return decode.forward(q, k_cache, v_cache, scale=self._scale)
        if decode is None:
            return extend.forward(q, k_cache, v_cache, scale=self._scale)
        border = ctx.num_decode_tokens
        return torch.cat(
            (
                decode.forward(q[:border], k_cache, v_cache, scale=self._scale),
                extend.forward(q[border:], k_cache, v_cache, scale=self._scale),
            )
        )


class GatedMLP:
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, options: LayerOptions, size: int = 0) -> None:
        bias = config.mlp_bias
        size = size or config.intermediate_size
        self.size = divide(size, options.group.world_size, "the intermediate size")
        """Columns of the gate on this rank."""
        self.gate_up = ColumnParallelLinear(
            config.hidden_size,
            (divided_part("gate_proj", size, options), divided_part("up_proj", size, options)),
            bias=bias,
            options=options,
        )
        self.down = RowParallelLinear(size, config.hidden_size, bias=bias, options=options)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Slots of all projections; `prefix` ends with a dot."""
        yield from self.gate_up.weight_slots(prefix)
        yield from self.down.weight_slots(f"{prefix}down_proj")

    def pack(self) -> None:
        """Packs the projections after loading."""
        self.gate_up.pack()
        self.down.pack()

    def drop(self) -> None:
        """Lets go of the projections: others hold them now."""
        self.gate_up.drop()
        self.down.drop()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden] to [T, hidden]."""
        return self.down.forward(silu_and_mul(self.gate_up.forward(hidden)))


def _qkv_parts(
    config: ModelConfig, options: LayerOptions, names: AttentionNames
) -> tuple[ColumnPart, ColumnPart, ColumnPart]:
    """This rank's heads of q, k and v."""
    head_dim = config.head_dim
    num_heads, num_kv_heads = local_heads(config, options.group.world_size)
    first_kv_head = options.group.rank * config.num_kv_heads // options.group.world_size
    sizes = [heads * head_dim for heads in (config.num_heads, *[config.num_kv_heads] * 2)]
    starts = [options.group.rank * num_heads * head_dim, *[first_kv_head * head_dim] * 2]
    local = [heads * head_dim for heads in (num_heads, num_kv_heads, num_kv_heads)]
    if names.is_fused:
        starts = [start + sum(sizes[:index]) for index, start in enumerate(starts)]
        sizes = [sum(sizes)] * 3
    q, k, v = (
        ColumnPart(name=name, full_size=size, local_size=own, start=start)
        for name, size, own, start in zip(
            (names.q, names.k, names.v), sizes, local, starts, strict=True
        )
    )
    return q, k, v


def local_heads(config: ModelConfig, world_size: int) -> tuple[int, int]:
    """Query heads and kv heads of one rank.

    Raises:
        ValueError: the ranks cannot share the heads evenly; the message has the numbers.
    """
    num_heads = divide(config.num_heads, world_size, "the number of attention heads")
    if config.num_kv_heads >= world_size:
        return num_heads, divide(config.num_kv_heads, world_size, "the number of key-value heads")
    if world_size % config.num_kv_heads:
        raise ValueError(
            f"--tensor-parallel-size {world_size} is no multiple of the number of key-value heads "
            f"({config.num_kv_heads}), so ranks cannot hold copies of them: choose a multiple"
        )
    return num_heads, 1
