"""A layer's experts, and the router that chooses among them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels import PackedLinear, fused_moe, linear, pack_linear_weight
from worker.models.config import ModelConfig
from worker.models.layers import GatedMLP
from worker.models.linear import divide
from worker.models.linear_method import LayerOptions, WeightSlot
from worker.models.moe_config import MoeConfig


class MoeMLP:
    """Each rank holds a share of the columns of every expert.

    Args:
        config: of the model.
        moe: its experts.
        options: of the rank.
    """

    def __init__(self, config: ModelConfig, moe: MoeConfig, options: LayerOptions) -> None:
        self._moe = moe
        self._options = options
        self._hidden_size = config.hidden_size
        world_size = options.group.world_size
        self._size = divide(moe.intermediate_size, world_size, "the size of an expert")
        hidden_size, count = config.hidden_size, moe.num_experts
        dtype, device = options.dtype, options.device
        self._gate_up = torch.empty(count, 2 * self._size, hidden_size, dtype=dtype, device=device)
        self._down = torch.empty(count, hidden_size, self._size, dtype=dtype, device=device)
        # Routing is decided in fp32: it must not depend on how activations are rounded.
        self._router: torch.Tensor | None = torch.empty(
            count, hidden_size, dtype=torch.float32, device=device
        )
        self._packed_router: PackedLinear
        self._bias = None
        if moe.has_bias:
            self._bias = torch.zeros(count, dtype=torch.float32, device=device)
        self._shared: GatedMLP | None = None
        if moe.shared_size:
            self._shared = GatedMLP(config, options, moe.shared_size)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Slots of the router and all experts; `prefix` ends with a dot."""
        assert self._router is not None, "slots exist until the weights are packed"
        shape = (self._moe.intermediate_size, self._hidden_size)
        start = self._options.group.rank * self._size
        yield WeightSlot(
            name=f"{prefix}gate.weight",
            destination=self._router,
            full_shape=tuple(self._router.shape),
        )
        if self._bias is not None:
            name = f"{prefix}gate.expert_bias"
            yield WeightSlot(name=name, destination=self._bias, full_shape=(len(self._bias),))
        for expert in range(self._moe.num_experts):
            own = f"{prefix}experts.{expert}."
            gate_up, size = self._gate_up[expert], self._size
            for name, rows in (("gate_proj", gate_up[:size]), ("up_proj", gate_up[size:])):
                yield WeightSlot(
                    name=f"{own}{name}.weight", destination=rows, full_shape=shape, start=start
                )
            yield WeightSlot(
                name=f"{own}down_proj.weight",
                destination=self._down[expert],
                full_shape=shape[::-1],
                dim=1,
                start=start,
            )
        if self._shared is not None:
            yield from self._shared.weight_slots(f"{prefix}shared_experts.")

    def pack(self) -> None:
        """Packs the router after loading; experts are used as they are."""
        assert self._router is not None, "packed twice"
        invariant = self._options.batch_invariant
        self._packed_router = pack_linear_weight(self._router, batch_invariant=invariant)
        self._router = None
        if self._shared is not None:
            self._shared.pack()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden] to [T, hidden]."""
        scores = linear(hidden.float(), self._packed_router)
        expert_ids, weights = choose_experts(scores, self._bias, self._moe)
        out = fused_moe(hidden, self._gate_up, self._down, expert_ids, weights)
        group = self._options.group
        if group.world_size > 1:
            out = group.all_reduce(out, fixed_order=self._options.batch_invariant)
        return out if self._shared is None else out + self._shared.forward(hidden)


def choose_experts(
    scores: torch.Tensor, bias: torch.Tensor | None, moe: MoeConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts [T, K] int64 and their weights [T, K] fp32, from the router's scores [T, E] fp32."""
    shares = scores.sigmoid() if moe.sigmoid else scores.softmax(dim=-1)
    ranking = shares if bias is None else shares + bias
    if moe.num_chosen_groups < moe.num_groups:
        groups = ranking.view(len(ranking), moe.num_groups, -1)
        best = groups.topk(min(2, groups.shape[2]), dim=-1).values.sum(dim=-1)
        chosen = best.topk(moe.num_chosen_groups, dim=-1).indices
        is_left_out = torch.ones_like(best, dtype=torch.bool).scatter_(1, chosen, False)
        ranking = groups.masked_fill(is_left_out.unsqueeze(2), -torch.inf).flatten(1)
    expert_ids = ranking.topk(moe.num_chosen, dim=-1).indices
    weights = shares.gather(1, expert_ids)
    if moe.normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return expert_ids, weights * moe.scale
