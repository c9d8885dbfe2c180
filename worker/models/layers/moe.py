"""Mixture of experts (MoE) of a layer: router and experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import torch

from kernels import (
    SILU,
    Activation,
    ExpertChoice,
    Experts,
    ExtraTerms,
    Routing,
    choose_experts,
    fused_moe,
    registry,
    soft_cap_,
)
from worker.models.config.checkpoint import find_shape
from worker.models.config.model_config import ModelConfig
from worker.models.config.moe_config import MoeConfig
from worker.models.layers.attention import GatedMLP
from worker.models.layers.expert_share import ExpertShare, share_experts
from worker.models.layers.linear import build_router
from worker.models.layers.linear_method import (
    LayerOptions,
    LinearWeight,
    Stacked,
    WeightPart,
    WeightSlot,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StackedNames:
    """Checkpoint names of two tensors that hold all of a layer's experts, unquantized."""

    gate_up: str = "experts.gate_up_proj"
    """Name of the gate and up projections [experts, 2 * size, hidden]."""
    down: str = "experts.down_proj"
    """Name of the down projections [experts, hidden, size]."""
    is_transposed: bool = False
    """Whether the last two dimensions are transposed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeNames:
    """Names of the weights of an MoE block in a checkpoint."""

    router: str = "gate"
    bias: str = "gate.expert_bias"
    """Name of the router's per-expert bias."""
    bias_is_matrix: bool = False
    """Whether the bias is [1, experts] in a checkpoint."""
    experts: str = "experts"
    """Name of the module that holds the experts."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    stacks_projections: bool = False
    """Whether the gate projections of all experts are one tensor [experts, out, in]. If so, the up
    projections, the down projections and the scales are also stacked."""
    shared: str = "shared_experts"
    """Name of the shared expert."""
    shared_gate: str = ""
    """Name of the gate whose sigmoid multiplies the shared expert's output; empty if there is
    none."""
    stacked: StackedNames | None = None
    """Names of tensors that stack all experts and also gate and up projections; None if gate and up
    are separate tensors."""


def as_stored(names: MoeNames, config: ModelConfig) -> MoeNames:
    """The names as stored in a checkpoint, whose file headers show whether all experts of a layer
    are stacked in two tensors (`StackedNames`)."""
    assert config.moe is not None, "the architecture has experts"
    stacked = StackedNames()
    shape = find_shape(config.folder, f".{stacked.gate_up}")
    if shape is None or config.quantization is not None:
        return names
    plain = [2 * config.moe.intermediate_size, config.hidden_size]
    return replace(names, stacked=replace(stacked, is_transposed=shape[1:] != plain))


class RoutedExperts:
    """Routed experts: MLPs, gated or not; each token uses some of them. Each rank holds either
    columns of every expert or some whole experts (`ExpertShare`).

    Args:
        config: the model's configuration.
        moe: the layer's experts.
        options: options of the model's layers.
        names: names of the parts in a checkpoint.
        num_shared: number of additional experts, used by every token, into which the shared expert
            is split; 0 if there is none or it is computed separately.
        activation: gated or ungated activation.
    """

    def __init__(
        self,
        config: ModelConfig,
        moe: MoeConfig,
        options: LayerOptions,
        names: MoeNames,
        *,
        num_shared: int = 0,
        activation: Activation = SILU,
    ) -> None:
        self._moe, self._names, self._options = moe, names, options
        self._activation = activation
        self._hidden_size = config.hidden_size
        hidden_size = config.hidden_size
        self._share = share = share_experts(moe, options)
        self._num_shared = num_shared
        count = share.count + num_shared
        method = options.linear_method
        full = moe.intermediate_size, hidden_size
        here = range(share.first, share.first + share.count)
        ups = (names.gate, names.up) if activation.is_gated else (names.up,)
        own = (share.size, hidden_size)
        projections = (*ups, names.down)
        # Of tensors that stack all experts, each rank reads slices.
        num_stacked = moe.num_experts if names.stacks_projections else 0
        up_parts, down_parts = _expert_parts(full, share, projections, here, own, num_stacked)
        self._gate_up: LinearWeight | None = method.allocate(
            (len(ups) * count * share.size, hidden_size), up_parts, options
        )
        self._down: LinearWeight | None = method.allocate(
            (count * hidden_size, share.size), down_parts, options
        )
        # Slots of other ranks' experts have no rows, but let the headers of all tensors be checked.
        elsewhere = tuple(
            expert for expert in range(moe.num_experts) if not (num_stacked or expert in here)
        )
        others = _expert_parts(full, share, projections, elsewhere, (0, 0))
        self._elsewhere = [
            method.allocate((0, size), parts, options)
            for size, parts in zip((hidden_size, share.size), others, strict=True)
            if parts
        ]
        self._experts: Experts

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of all experts; `prefix` is the block's and ends with a dot."""
        assert self._gate_up is not None, "slots exist until the weights are packed"
        assert self._down is not None, "slots exist until the weights are packed"
        if self._names.stacked is not None:
            yield from self._stacked_slots(prefix, self._names.stacked)
        else:
            for weight in (self._gate_up, self._down, *self._elsewhere):
                yield from weight.slots(f"{prefix}{self._names.experts}.")
        if self._num_shared:
            yield from self._shared_slots(f"{prefix}{self._names.shared}.")

    def _shared_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of the shared expert, split into experts of the routed experts' size; its
        tensors are named as in an MLP."""
        assert self._gate_up is not None, "slots exist until the weights are packed"
        assert self._down is not None, "slots exist until the weights are packed"
        share, hidden = self._share, self._hidden_size
        ups = self._gate_up.destination().view(-1, 2, share.size, hidden)[share.count :]
        downs = self._down.destination().view(-1, hidden, share.size)[share.count :]
        full = self._num_shared * self._moe.intermediate_size
        for index, (both, down) in enumerate(zip(ups, downs, strict=True)):
            start = index * self._moe.intermediate_size + share.start
            for name, part in zip(("gate_proj", "up_proj"), both, strict=True):
                yield WeightSlot(
                    name=f"{prefix}{name}.weight",
                    destination=part,
                    full_shape=(full, hidden),
                    start=start,
                )
            yield WeightSlot(
                name=f"{prefix}down_proj.weight",
                destination=down,
                full_shape=(hidden, full),
                dim=1,
                start=start,
            )

    def _stacked_slots(self, prefix: str, names: StackedNames) -> Iterator[WeightSlot]:
        """Weight slots of a checkpoint with all experts in two tensors."""
        assert self._gate_up is not None, "slots exist until the weights are packed"
        assert self._down is not None, "slots exist until the weights are packed"
        assert self._activation.is_gated, "stacked experts have gates"
        full_size, hidden, share = self._moe.intermediate_size, self._hidden_size, self._share
        both = self._gate_up.destination().view(-1, 2 * share.size, hidden)[: share.count]
        down = self._down.destination().view(-1, hidden, share.size)[: share.count]

        def slot(name: str, part: torch.Tensor, dim: int, length: int, start: int) -> WeightSlot:
            full = [self._moe.num_experts, hidden, hidden]
            full[dim] = length
            if names.is_transposed:
                part, dim, full = part.transpose(1, 2), 3 - dim, [full[0], *full[:0:-1]]
            dim, start = share.cut(dim, start)
            return WeightSlot(
                name=prefix + name, destination=part, full_shape=tuple(full), dim=dim, start=start
            )

        # A rank's columns of gate and up are not contiguous in the checkpoint's tensor.
        for index, part in enumerate(both.chunk(1 if share.is_whole else 2, dim=1)):
            yield slot(names.gate_up, part, 1, 2 * full_size, index * full_size + share.start)
        yield slot(names.down, down, 2, full_size, share.start)

    def process_after_loading(self) -> None:
        """Packs the experts after loading."""
        assert self._gate_up is not None, "packed twice"
        assert self._down is not None, "packed twice"
        count = self._share.count + self._num_shared
        self._experts = Experts(self._gate_up.pack_experts(count), self._down.pack_experts(count))
        self._gate_up = self._down = None
        self._elsewhere.clear()

    def forward(
        self,
        hidden: torch.Tensor,
        choice: ExpertChoice,
        *,
        extra: ExtraTerms = ExtraTerms(),  # noqa: B008  # a tuple
        weighs_inputs: bool = False,
    ) -> torch.Tensor:
        """Runs the selected experts on inputs [T, hidden]; returns the outputs [T, hidden], summed
        over ranks.

        Args:
            hidden: [T, hidden]: input of the experts.
            choice: experts of each token, and their weights.
            extra: this rank's share of the terms that are added to the experts' output.
            weighs_inputs: whether the weights are applied to the experts' inputs instead of their
                outputs.
        """
        group = self._options.group
        if group.rank:
            extra = extra._replace(first_zero_expert=None)  # zero experts are added once, on rank 0
        out = fused_moe(
            *(hidden, self._experts, choice),
            extra=extra,
            activation=self._activation,
            first_expert=self._share.first,
            weighs_inputs=weighs_inputs,
            batch_invariant=self._options.batch_invariant,
        )
        if group.world_size > 1:
            out = group.all_reduce(out, fixed_order=self._options.batch_invariant)
        return out


class MoeMLP:
    """Feed-forward block with a router, routed experts, and possibly a shared expert.

    Args:
        config: configuration of a model with experts.
        options: options of the model's layers.
        names: names of the parts in a checkpoint.
        activation: activation of the routed experts.
        shared_activation: activation of the shared expert.
    """

    needs_fp32: ClassVar[bool] = True
    weighs_inputs: ClassVar[bool] = False
    """Whether the router's weights are applied to the experts' inputs instead of their outputs."""

    def __init__(
        self,
        config: ModelConfig,
        options: LayerOptions,
        names: MoeNames = MoeNames(),  # frozen
        *,
        activation: Activation = SILU,
        shared_activation: Activation = SILU,
    ) -> None:
        moe = config.moe
        assert moe is not None, "the architecture has experts"
        self._moe = moe
        self._names = names
        self._options = options
        are_alike = activation == shared_activation
        num_shared = num_joined(config, moe, options) if are_alike else 0
        self._experts = RoutedExperts(
            *(config, moe, options, names), num_shared=num_shared, activation=activation
        )
        self._routing = replace(routing_of(moe), num_always=num_shared)
        scores = {names.router: moe.num_scored}
        if names.shared_gate:
            scores[names.shared_gate] = 1
        self._router = build_router(config.hidden_size, scores, options)
        self._bias = None
        if moe.has_bias:
            self._bias = torch.zeros(moe.num_scored, dtype=torch.float32, device=options.device)
        self._shared: GatedMLP | None = None
        if moe.shared_size and not num_shared:
            self._shared = GatedMLP(config, options, moe.shared_size, activate=shared_activation)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of the router and all experts; `prefix` ends with a dot."""
        yield from self._router.weight_slots(prefix)
        if self._bias is not None:
            bias = self._bias.view(1, -1) if self._names.bias_is_matrix else self._bias
            yield WeightSlot(
                name=f"{prefix}{self._names.bias}", destination=bias, full_shape=tuple(bias.shape)
            )
        yield from self._experts.weight_slots(prefix)
        if self._shared is not None:
            yield from self._shared.weight_slots(f"{prefix}{self._names.shared}.")

    def process_after_loading(self) -> None:
        """Packs the router and the experts after loading."""
        self._router.process_after_loading()
        self._experts.process_after_loading()
        if self._shared is not None:
            self._shared.process_after_loading()

    def forward(self, hidden: torch.Tensor, fp32_input: torch.Tensor | None = None) -> torch.Tensor:
        """Maps inputs [T, hidden] to outputs [T, hidden]. The router reads `fp32_input`, the same
        input in fp32."""
        choice, gate = self._choose(hidden, fp32_input)
        if self._shared is None:
            return self.run(hidden, choice)
        return self.run(hidden, choice, self._shared.forward_share(hidden), gate)

    def choose(self, hidden: torch.Tensor, fp32_input: torch.Tensor | None = None) -> ExpertChoice:
        """Experts of each token, and their weights, for inputs [T, hidden]; the router reads
        `fp32_input`, the same input in fp32."""
        return self._choose(hidden, fp32_input)[0]

    def run(
        self,
        hidden: torch.Tensor,
        choice: ExpertChoice,
        shared: torch.Tensor | None = None,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs the selected experts on inputs [T, hidden]; returns the outputs [T, hidden], summed
        over ranks.

        Args:
            hidden: [T, hidden]: input of the experts.
            choice: experts of each token, and their weights.
            shared: [T, hidden]: this rank's partial output of the shared expert; None if there is
                none.
            gate: [T, 1]: gate of `shared`, before the sigmoid; None if there is no gate.
        """
        first_zero_expert = self._moe.num_experts if self._moe.num_zero_experts else None
        extra = ExtraTerms(shared=shared, gate=gate, first_zero_expert=first_zero_expert)
        return self._experts.forward(hidden, choice, extra=extra, weighs_inputs=self.weighs_inputs)

    def _choose(
        self, hidden: torch.Tensor, fp32_input: torch.Tensor | None
    ) -> tuple[ExpertChoice, torch.Tensor | None]:
        """Experts of each token with their weights, and the shared expert's gate [T, 1], if any."""
        scores = self._router.forward(hidden.float() if fp32_input is None else fp32_input)
        count = self._moe.num_scored
        gate = scores[:, count:] if self._names.shared_gate else None
        scores = scores[:, :count]
        if self._moe.score_cap is not None:
            soft_cap_(scores, self._moe.score_cap)
        return choose_experts(scores, self._bias, self._routing, gate), gate


def num_joined(config: ModelConfig, moe: MoeConfig, options: LayerOptions) -> int:
    """Number of experts into which the shared expert is split, so that it is computed along with
    the routed experts, which saves the kernel launches of an MLP. 0 if it is computed separately:
    without Triton, or if its size, format or sharding does not match the routed experts."""
    if (
        not registry.uses_triton(options.device)
        or config.quantization is not None
        or options.expert_parallel
        or config.mlp_bias
        or moe.num_zero_experts
        or moe.shared_size % moe.intermediate_size
    ):
        return 0
    return moe.shared_size // moe.intermediate_size


@lru_cache(maxsize=4)  # usually the same for all layers; DeepSeek-V3 has 45,000 parts
def _expert_parts(
    full: tuple[int, int],
    share: ExpertShare,
    names: tuple[str, ...],
    experts: range | tuple[int, ...],
    local: tuple[int, int],
    num_stacked: int = 0,
) -> tuple[tuple[WeightPart, ...], tuple[WeightPart, ...]]:
    """Parts of a rank's weights: of gate and up projections, and of down projections.

    Args:
        full: shape of an expert's gate projection in the checkpoint, [size, hidden].
        share: the rank's expert share.
        names: checkpoint names of gate and up (or only up), and of down.
        experts: the experts whose parts are listed.
        local: numbers of rows of each gate and of each down projection on this rank.
        num_stacked: number of experts that a tensor of the checkpoint stacks; 0 for separate
            tensors.
    """
    up_parts: list[WeightPart] = []
    down_parts: list[WeightPart] = []
    *ups, down = names
    for place, expert in enumerate(experts):
        stacked = Stacked(index=expert, count=num_stacked) if num_stacked else None
        for index, name in enumerate(ups, start=len(ups) * place):
            up_parts.append(
                WeightPart(
                    name=name if stacked else f"{expert}.{name}",
                    stacked=stacked,
                    full_shape=full,
                    rows=slice(index * local[0], (index + 1) * local[0]),
                    dim=0,
                    start=share.start,
                )
            )
        down_parts.append(
            WeightPart(
                name=down if stacked else f"{expert}.{down}",
                stacked=stacked,
                full_shape=full[::-1],
                rows=slice(place * local[1], (place + 1) * local[1]),
                dim=0 if share.is_whole else 1,
                start=share.start,
            )
        )
    return tuple(up_parts), tuple(down_parts)


def routing_of(moe: MoeConfig) -> Routing:
    """Routing of a layer's experts for `choose_experts`."""
    return Routing(
        top_k=moe.top_k,
        scoring="sigmoid" if moe.sigmoid else "softmax",
        normalize=moe.normalize,
        num_groups=moe.num_groups,
        top_k_groups=moe.top_k_groups,
        num_summed=moe.num_summed,
        block_size=moe.block_size,
        block_capacity=moe.block_capacity,
        scale=moe.scale,
    )
