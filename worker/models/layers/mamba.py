"""Mamba-2 (arXiv 2405.21060): a short convolution and a selective scan, whose output is gated."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels import Fp8Inputs, ScanLayer, rowwise, selective_scan
from kernels.states import Inputs, StateRows, advance_with_drafts
from worker.models.config.model_config import ModelConfig
from worker.models.layers.context import ForwardContext
from worker.models.layers.convolution import ChannelPart, ShortConvolution
from worker.models.layers.kv_cache import KVCacheSpec, StatePlane, StateSpec
from worker.models.layers.linear import (
    ColumnParallelLinear,
    ColumnPart,
    RowParallelLinear,
    Rows,
)
from worker.models.layers.linear_method import LayerOptions, WeightSlot
from worker.models.layers.sharing import divide


class Mamba2:
    """Mamba-2. Each rank computes its share of the heads, with their groups; if there are more
    ranks than groups, adjacent ranks compute B and C of the same group.

    Args:
        config: the model's configuration.
        options: options of the model's layers.
        index: 0-based index of the layer.

    Raises:
        ValueError: heads and groups cannot be split evenly across the ranks.
    """

    def __init__(self, config: ModelConfig, options: LayerOptions, index: int) -> None:
        group, sizes = options.group, config.mamba
        assert sizes is not None, "the architecture has Mamba-2 layers"
        self._layer_index, self._options = index, options
        self._eps = config.rms_norm_eps
        self._all_groups = sizes.num_groups
        self._num_heads = divide(sizes.num_heads, group.world_size, "the number of Mamba heads")
        self._num_groups, self._first_group = _share_groups(sizes.num_groups, options)
        self._sizes = sizes
        values = self._num_heads * sizes.head_dim
        shared = self._num_groups * sizes.state_dim
        self._widths = [values, values, shared, shared, self._num_heads]
        """Widths of z, x, B, C and dt on this rank."""
        own = [group.rank * values, group.rank * values]
        own += [self._first_group * sizes.state_dim] * 2 + [group.rank * self._num_heads]
        starts = [sum(sizes.widths[:part]) + start for part, start in enumerate(own)]
        parts = [
            ColumnPart(name="in_proj", full_size=sum(sizes.widths), local_size=width, start=start)
            for width, start in zip(self._widths, starts, strict=True)
        ]
        self._input = ColumnParallelLinear(
            config.hidden_size, parts, bias=sizes.input_bias, options=options, supports_lora=True
        )
        self._output = RowParallelLinear(
            sizes.widths[0],
            config.hidden_size,
            bias=sizes.output_bias,
            options=options,
            supports_lora=True,
        )
        self._conv = ShortConvolution(
            [
                ChannelPart(start - sizes.widths[0], width)
                for width, start in zip(self._widths[1:4], starts[1:4], strict=True)
            ],
            sum(sizes.widths[1:4]),
            sizes.num_taps,
            has_bias=sizes.conv_bias,
            has_silu=True,
            options=options,
        )
        self._create_weights(options)
        state = (self._num_heads, sizes.state_dim, sizes.head_dim)
        self.kv_cache_spec: KVCacheSpec | None = None
        """None, since Mamba-2 keeps no keys and values."""
        self.state_spec: StateSpec | None = StateSpec(
            planes=(self._conv.plane, StatePlane(state, torch.float32)),
            inputs=(StatePlane((sum(self._widths[1:]),), options.dtype),),
        )
        """Specification of the state per request: last inputs of the convolution, and the recurrent
        state. The recurrence's inputs are the projections except z."""

    def _create_weights(self, options: LayerOptions) -> None:
        """Allocates all weights except projections and the convolution."""
        rates, biases, skips = (
            torch.empty(self._num_heads, dtype=torch.float32, device=options.device)
            for _ in range(3)
        )
        self._scan = ScanLayer(
            log_rate=rates,
            step_bias=biases,
            skip=skips,
            num_groups=self._num_groups,
            head_dim=self._sizes.head_dim,
            state_dim=self._sizes.state_dim,
        )
        self._norm: torch.Tensor | None = None
        if self._sizes.order != "no norm":
            self._norm = torch.empty(self._widths[0], dtype=options.dtype, device=options.device)
        self._multipliers: torch.Tensor | None = None
        if self._sizes.multipliers is not None:
            factors = torch.tensor(self._sizes.multipliers, dtype=torch.float32)
            repeats = torch.tensor(self._widths)
            self._multipliers = factors.repeat_interleave(repeats).to(options.device)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of the projections, the convolution, the scan and the norm; `prefix` ends
        with a dot."""
        yield from self._input.weight_slots(prefix)
        yield from self._conv.weight_slots(f"{prefix}conv1d")
        yield from self._output.weight_slots(f"{prefix}out_proj")
        rank = self._options.group.rank
        for name, heads in zip(("A_log", "dt_bias", "D"), self._scan[:3], strict=True):
            yield WeightSlot(
                name=f"{prefix}{name}",
                destination=heads,
                full_shape=(self._sizes.num_heads,),
                start=rank * self._num_heads,
            )
        if self._norm is not None:
            yield WeightSlot(
                name=f"{prefix}norm.weight",
                destination=self._norm,
                full_shape=(self._sizes.widths[0],),
                start=rank * self._widths[0],
            )

    def process_after_loading(self) -> None:
        """Packs the projections after loading, and transposes the weights of the convolution."""
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
        projected = self._input.forward(hidden)
        if self._multipliers is not None:
            projected = (projected * self._multipliers).to(projected.dtype)
        widths = self._widths
        z, inputs = projected.split([widths[0], sum(widths[1:])], dim=1)

        def advance(inputs: Inputs, rows: StateRows) -> torch.Tensor:
            mixed, steps = inputs[0].split([sum(widths[1:4]), widths[4]], dim=1)
            mixed = self._conv.forward(mixed, states.conv, rows)
            by_position = self._options.batch_invariant
            return selective_scan(
                *(mixed, steps, self._scan, states.recurrent, rows), by_position=by_position
            )

        out = advance_with_drafts([inputs], states, rows, advance)
        if logits_indices is not None:
            out, z = (part.index_select(0, logits_indices) for part in (out, z))
        return self._output.forward(self.gate(out, z))

    def gate(self, out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Gates the outputs [T, values] by z [T, values] and normalizes them, computed in fp32."""
        wide, gate = out.float(), rowwise.silu(z.float())
        order = self._sizes.order
        if order != "norm first":
            wide = wide * gate
        if self._norm is not None:
            wide = self._normalised(wide) * self._norm.float()
        if order == "norm first":
            wide = wide * gate
        return wide.to(out.dtype)

    def _normalised(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, values] fp32, divided by the root mean square of each group."""
        group, count = self._options.group, self._num_groups
        groups = x.view(len(x), count, -1)
        if self._all_groups >= group.world_size:
            square = groups.square().mean(-1, keepdim=True)
            return (groups * (square + self._eps).rsqrt()).flatten(1)
        # A group's values are divided among ranks, which sum their squares with an all-reduce.
        sums = x.new_zeros(len(x), self._all_groups)
        sums[:, self._first_group] = groups.square().sum(-1).squeeze(1)
        sums = group.all_reduce(sums, fixed_order=self._options.batch_invariant)
        size = self._sizes.widths[0] // self._all_groups
        square = sums[:, self._first_group : self._first_group + 1] / size
        return x * (square + self._eps).rsqrt()


def _share_groups(num_groups: int, options: LayerOptions) -> tuple[int, int]:
    """Number of groups on this rank, and index of the first one."""
    world_size, rank = options.group.world_size, options.group.rank
    if num_groups >= world_size:
        local = divide(num_groups, world_size, "the number of Mamba groups")
        return local, rank * local
    if world_size % num_groups:
        raise ValueError(
            f"--tensor-parallel-size {world_size} is not a multiple of the number of Mamba groups "
            f"({num_groups}): use a multiple"
        )
    return 1, rank * num_groups // world_size
