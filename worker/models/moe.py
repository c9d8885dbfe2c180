"""A layer's experts, and the router that chooses among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from kernels import (
    SILU,
    Activation,
    Beside,
    ExpertChoice,
    Experts,
    Routing,
    choose_experts,
    fused_moe,
    registry,
)
from worker.models.checkpoint import find_shape
from worker.models.config import ModelConfig
from worker.models.expert_share import ExpertShare, share_experts
from worker.models.layers import GatedMLP
from worker.models.linear import build_router
from worker.models.linear_method import LayerOptions, LinearWeight, WeightPart, WeightSlot
from worker.models.moe_config import MoeConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class StackedNames:
    """Names in a checkpoint of the two tensors that hold all of a layer's experts, unquantized."""

    gate_up: str = "experts.gate_up_proj"
    """Gates and ups [experts, 2 * size, hidden]."""
    down: str = "experts.down_proj"
    """Downs [experts, hidden, size]."""
    is_transposed: bool = False
    """Whether the last two dimensions are the other way round."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeNames:
    """Names of the parts of a mixture of experts in a checkpoint."""

    router: str = "gate"
    bias: str = "gate.expert_bias"
    """The router's bias per expert."""
    bias_is_matrix: bool = False
    """Whether that is [1, experts]."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    """The three weights of an expert."""
    shared: str = "shared_experts"
    """The MLP that every token takes."""
    shared_gate: str = ""
    """Name of the gate that says how much it counts for a token; empty where it counts fully."""
    stacked: StackedNames | None = None
    """The experts' names where they are stacked; None where each has tensors of its own."""


def as_stored(names: MoeNames, config: ModelConfig) -> MoeNames:
    """The names of a checkpoint that may stack its experts, as the headers of its files tell."""
    assert config.moe is not None, "the architecture has experts"
    stacked = StackedNames()
    shape = find_shape(config.folder, f".{stacked.gate_up}")
    if shape is None or config.quantization is not None:
        return names
    plain = [2 * config.moe.intermediate_size, config.hidden_size]
    return replace(names, stacked=replace(stacked, is_transposed=shape[1:] != plain))


class RoutedExperts:
    """A mixture of experts (MoE): gated MLPs, of which each token takes some. Each rank holds a
    share of the columns of every one, or some of them whole (`ExpertShare`).

    Args:
        config: of the model.
        moe: the experts.
        options: of the rank.
        names: what a checkpoint calls the parts.
        num_shared: how many experts as large as these the one is that every token takes, where it
            is held behind them.
        activation: what gates and ups come to.
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
        up_parts, down_parts = _expert_parts(full, share, names, here, (share.size, hidden_size))
        self._gate_up: LinearWeight | None = method.allocate(
            (2 * count * share.size, hidden_size), up_parts, options
        )
        self._down: LinearWeight | None = method.allocate(
            (count * hidden_size, share.size), down_parts, options
        )
        # Of experts that other ranks hold no row is read, and headers are compared all the same.
        elsewhere = [expert for expert in range(moe.num_experts) if expert not in here]
        others = _expert_parts(full, share, names, elsewhere, (0, 0))
        self._elsewhere = [
            method.allocate((0, size), parts, options)
            for size, parts in zip((hidden_size, share.size), others, strict=True)
            if parts
        ]
        self._experts: Experts

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Slots of all experts; `prefix` is that of the block they are in, and ends with a dot."""
        assert self._gate_up is not None, "slots exist until the weights are packed"
        assert self._down is not None, "slots exist until the weights are packed"
        if self._names.stacked is not None:
            yield from self._stacked_slots(prefix, self._names.stacked)
        else:
            yield from self._gate_up.slots(f"{prefix}experts.")
            yield from self._down.slots(f"{prefix}experts.")
            for weight in self._elsewhere:
                yield from weight.slots(f"{prefix}experts.")
        if self._num_shared:
            yield from self._shared_slots(f"{prefix}{self._names.shared}.")

    def _shared_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Slots of the expert that every token takes, cut into some as large as the others."""
        assert self._gate_up is not None, "slots exist until the weights are packed"
        assert self._down is not None, "slots exist until the weights are packed"
        names, share, hidden = self._names, self._share, self._hidden_size
        ups = self._gate_up.dense().view(-1, 2, share.size, hidden)[share.count :]
        downs = self._down.dense().view(-1, hidden, share.size)[share.count :]
        full = self._num_shared * self._moe.intermediate_size
        for index, (both, down) in enumerate(zip(ups, downs, strict=True)):
            start = index * self._moe.intermediate_size + share.start
            for name, part in zip((names.gate, names.up), both, strict=True):
                yield WeightSlot(
                    name=f"{prefix}{name}.weight",
                    destination=part,
                    full_shape=(full, hidden),
                    start=start,
                )
            yield WeightSlot(
                name=f"{prefix}{names.down}.weight",
                destination=down,
                full_shape=(hidden, full),
                dim=1,
                start=start,
            )

    def _stacked_slots(self, prefix: str, names: StackedNames) -> Iterator[WeightSlot]:
        """Slots of a checkpoint that has all experts' gates and ups in one tensor."""
        assert self._gate_up is not None, "slots exist until the weights are packed"
        assert self._down is not None, "slots exist until the weights are packed"
        full_size, hidden, share = self._moe.intermediate_size, self._hidden_size, self._share
        both = self._gate_up.dense().view(-1, 2 * share.size, hidden)[: share.count]
        down = self._down.dense().view(-1, hidden, share.size)[: share.count]

        def slot(name: str, part: torch.Tensor, dim: int, length: int, start: int) -> WeightSlot:
            full = [self._moe.num_experts, hidden, hidden]
            full[dim] = length
            if names.is_transposed:
                part, dim, full = part.transpose(1, 2), 3 - dim, [full[0], *full[:0:-1]]
            dim, start = share.cut(dim, start)
            return WeightSlot(
                name=prefix + name, destination=part, full_shape=tuple(full), dim=dim, start=start
            )

        # Columns of gates and of ups lie apart where ranks share them.
        for index, part in enumerate(both.chunk(1 if share.is_whole else 2, dim=1)):
            yield slot(names.gate_up, part, 1, 2 * full_size, index * full_size + share.start)
        yield slot(names.down, down, 2, full_size, share.start)

    def pack(self) -> None:
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
        beside: Beside = Beside(),  # noqa: B008  # a tuple
        weighs_inputs: bool = False,
    ) -> torch.Tensor:
        """[T, hidden] to [T, hidden], of all ranks.

        Args:
            hidden: what experts read.
            choice: each token's experts, and their weights.
            beside: what is added to what they yield, a share of it on each rank.
            weighs_inputs: whether the weights are those of what they read.
        """
        group = self._options.group
        if group.rank:
            beside = beside._replace(first_idle=None)  # what that adds is no rank's share
        out = fused_moe(
            *(hidden, self._experts, choice),
            beside=beside,
            activation=self._activation,
            first_expert=self._share.first,
            weighs_inputs=weighs_inputs,
            batch_invariant=self._options.batch_invariant,
        )
        if group.world_size > 1:
            out = group.all_reduce(out, fixed_order=self._options.batch_invariant)
        return out


class MoeMLP:
    """A router, the experts that it chooses from, and perhaps one that every token takes.

    Args:
        config: of the model, which has experts.
        options: of the rank.
        names: what a checkpoint calls the parts.
    """

    reads_wide: ClassVar[bool] = True
    weighs_inputs: ClassVar[bool] = False
    """Whether a token's weights are those of what its experts read, not of what they yield."""

    def __init__(
        self,
        config: ModelConfig,
        options: LayerOptions,
        names: MoeNames = MoeNames(),  # frozen
    ) -> None:
        moe = config.moe
        assert moe is not None, "the architecture has experts"
        self._moe = moe
        self._names = names
        self._options = options
        num_shared = num_joined(config, moe, options)
        self._experts = RoutedExperts(config, moe, options, names, num_shared=num_shared)
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
            self._shared = GatedMLP(config, options, moe.shared_size)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Slots of the router and all experts; `prefix` ends with a dot."""
        yield from self._router.weight_slots(prefix)
        if self._bias is not None:
            bias = self._bias.view(1, -1) if self._names.bias_is_matrix else self._bias
            yield WeightSlot(
                name=f"{prefix}{self._names.bias}", destination=bias, full_shape=tuple(bias.shape)
            )
        yield from self._experts.weight_slots(prefix)
        if self._shared is not None:
            yield from self._shared.weight_slots(f"{prefix}{self._names.shared}.")

    def pack(self) -> None:
        """Packs the router and the experts after loading."""
        self._router.pack()
        self._experts.pack()
        if self._shared is not None:
            self._shared.pack()

    def forward(self, hidden: torch.Tensor, wide: torch.Tensor | None = None) -> torch.Tensor:
        """[T, hidden] to [T, hidden]; the router reads `wide`, the same in fp32."""
        choice, gate = self._choose(hidden, wide)
        if self._shared is None:
            return self.run(hidden, choice)
        return self.run(hidden, choice, self._shared.forward_share(hidden), gate)

    def choose(self, hidden: torch.Tensor, wide: torch.Tensor | None = None) -> ExpertChoice:
        """The experts of each token of [T, hidden]; the router reads `wide`, the same in fp32."""
        return self._choose(hidden, wide)[0]

    def run(
        self,
        hidden: torch.Tensor,
        choice: ExpertChoice,
        shared: torch.Tensor | None = None,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, hidden] to [T, hidden], the sum of what its experts yield and of `shared`, of which
        each rank has a share, as far as its gate is open."""
        first_idle = self._moe.num_experts if self._moe.num_idle else None
        beside = Beside(shared=shared, gate=gate, first_idle=first_idle)
        return self._experts.forward(
            hidden, choice, beside=beside, weighs_inputs=self.weighs_inputs
        )

    def _choose(
        self, hidden: torch.Tensor, wide: torch.Tensor | None
    ) -> tuple[ExpertChoice, torch.Tensor | None]:
        """Each token's experts, and the gate of what every token takes."""
        scores = self._router.forward(hidden.float() if wide is None else wide)
        count = self._moe.num_scored
        gate = scores[:, count:] if self._names.shared_gate else None
        return choose_experts(scores[:, :count], self._bias, self._routing, gate), gate


def num_joined(config: ModelConfig, moe: MoeConfig, options: LayerOptions) -> int:
    """How many experts as large as the others the one is that every token takes, where it is to be
    computed with them: on CUDA that saves the launches of an MLP. 0 where it is computed apart,
    since it is of another size or format, or shared out otherwise."""
    if (
        not registry.uses_triton(options.device)
        or config.quantization is not None
        or options.expert_parallel
        or config.mlp_bias
        or moe.num_idle
        or moe.shared_size % moe.intermediate_size
    ):
        return 0
    return moe.shared_size // moe.intermediate_size


def _expert_parts(
    full: tuple[int, int],
    share: ExpertShare,
    names: MoeNames,
    experts: Sequence[int],
    local: tuple[int, int],
) -> tuple[list[WeightPart], list[WeightPart]]:
    """Parts of a rank's weights of gates and ups, and of downs.

    Args:
        full: rows of an expert's gate and of its down, in the checkpoint.
        share: of the rank.
        names: what a checkpoint calls the parts.
        experts: whose parts they are.
        local: rows of each gate and each down on this rank.
    """
    up_parts, down_parts = [], []
    for place, expert in enumerate(experts):
        for index, name in enumerate((names.gate, names.up), start=2 * place):
            up_parts.append(
                WeightPart(
                    name=f"{expert}.{name}",
                    full_shape=full,
                    rows=slice(index * local[0], (index + 1) * local[0]),
                    dim=0,
                    start=share.start,
                )
            )
        down_parts.append(
            WeightPart(
                name=f"{expert}.{names.down}",
                full_shape=full[::-1],
                rows=slice(place * local[1], (place + 1) * local[1]),
                dim=0 if share.is_whole else 1,
                start=share.start,
            )
        )
    return up_parts, down_parts


def routing_of(moe: MoeConfig) -> Routing:
    """How tokens choose among a layer's experts."""
    return Routing(
        num_chosen=moe.num_chosen,
        scoring="sigmoid" if moe.sigmoid else "softmax",
        normalize=moe.normalize,
        num_groups=moe.num_groups,
        num_chosen_groups=moe.num_chosen_groups,
        num_summed=moe.num_summed,
        scale=moe.scale,
    )
