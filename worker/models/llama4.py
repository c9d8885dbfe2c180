"""Llama 4 (huggingface.co/meta-llama): layers that see their chunk and rotate, and layers that see
everything and do not; experts that read what a router scales, beside one that every token takes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import ClassVar

import torch

from kernels import Beside, PackedLinear, Routing, choose_experts, linear, pack_linear_weight
from worker.models.checkpoint import positive_integer
from worker.models.config import ModelConfig
from worker.models.decoder import DecoderModel, FeedForward
from worker.models.layers import AttentionTraits, GatedMLP
from worker.models.linear_method import LayerOptions, WeightSlot
from worker.models.llama import LlamaLayer
from worker.models.moe import MoeNames, RoutedExperts, StackedNames, num_joined
from worker.models.moe_config import MoeConfig


class Llama4Moe:
    """An expert gets its tokens times the sigmoid of their scores, and what it yields counts fully.

    Args:
        config: of the model.
        moe: its experts.
        options: of the rank.
    """

    reads_wide: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, moe: MoeConfig, options: LayerOptions) -> None:
        self._options = options
        num_shared = num_joined(config, moe, options)
        self._routing = Routing(
            num_chosen=moe.num_chosen, scoring="sigmoid of chosen", num_always=num_shared
        )
        stacked = StackedNames(is_transposed=True) if config.quantization is None else None
        names = MoeNames(shared="shared_expert", stacked=stacked)
        self._experts = RoutedExperts(config, moe, options, names, num_shared=num_shared)
        self._shared: GatedMLP | None = None
        if not num_shared:
            self._shared = GatedMLP(config, options, moe.shared_size)
        # Routing is decided in fp32: it must not depend on how activations are rounded.
        self._router: torch.Tensor | None = torch.empty(
            moe.num_experts, config.hidden_size, dtype=torch.float32, device=options.device
        )
        self._packed_router: PackedLinear

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Slots of the router and all experts; `prefix` ends with a dot."""
        assert self._router is not None, "slots exist until the weights are packed"
        yield WeightSlot(
            name=f"{prefix}router.weight",
            destination=self._router,
            full_shape=tuple(self._router.shape),
        )
        yield from self._experts.weight_slots(prefix)
        if self._shared is not None:
            yield from self._shared.weight_slots(f"{prefix}shared_expert.")

    def pack(self) -> None:
        """Packs the router and the experts after loading."""
        assert self._router is not None, "packed twice"
        invariant = self._options.batch_invariant
        self._packed_router = pack_linear_weight(self._router, batch_invariant=invariant)
        self._router = None
        self._experts.pack()
        if self._shared is not None:
            self._shared.pack()

    def forward(self, hidden: torch.Tensor, wide: torch.Tensor | None = None) -> torch.Tensor:
        """[T, hidden] to [T, hidden]; the router reads `wide`, the same in fp32."""
        scores = linear(hidden.float() if wide is None else wide, self._packed_router)
        choice = choose_experts(scores, None, self._routing)
        beside = Beside()
        if self._shared is not None:
            beside = Beside(shared=self._shared.forward_share(hidden))
        return self._experts.forward(hidden, choice, beside=beside, weighs_inputs=True)


class Llama4ForCausalLM(DecoderModel):
    """Heads of queries and keys are normalised after they rotate, by no weight. Queries of layers
    where nothing rotates grow with their positions."""

    def build_layer(self, index: int) -> LlamaLayer:
        """With rotation or without, with experts or a single MLP."""
        assert self.config.rotating is not None, "its entry in the table of families tells"
        rotates = self.config.rotating[index]
        traits = AttentionTraits(
            rotates=rotates,
            is_interleaved=rotates,
            has_unit_heads=rotates and self.own("use_qk_norm"),
            query_scale=None if rotates else self._query_scale,
        )
        return LlamaLayer(
            self, index, self._build_mlp(index), traits=traits, mlp_name="feed_forward"
        )

    def _build_mlp(self, index: int) -> FeedForward:
        moe = self.config.moe
        assert moe is not None, "the architecture has experts"
        if index in moe.dense_layers:
            return GatedMLP(self.config, self.options, int(self.own("intermediate_size_mlp")))
        return Llama4Moe(self.config, moe, self.options)

    @cached_property
    def _query_scale(self) -> torch.Tensor | None:
        """1 + scale * ln(1 + floor((position + 1) / length)), by position."""
        if not self.own("attn_temperature_tuning"):
            return None
        positions = torch.arange(len(self.cos_sin), dtype=torch.float32)
        turns = torch.floor(
            (positions + 1) / positive_integer(self.config.own or {}, "floor_scale")
        )
        scale = float(self.own("attn_scale"))
        return (1 + scale * torch.log1p(turns)).to(self.options.device)
