"""Gemma 4 (huggingface.co/google): full-attention layers have wider heads and may use keys as
values; experts run in parallel with the MLP; each layer's output is scaled.

Schema: `config/vendors/google.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch

from kernels import (
    GELU,
    ExpertChoice,
    Norm,
    choose_experts,
    fused_add_norm,
)
from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.gemma import Gemma2ForCausalLM, GemmaLayer
from worker.models.config.moe_config import MoeConfig
from worker.models.layers.attention import AttentionTraits
from worker.models.layers.linear import build_router
from worker.models.layers.linear_method import WeightSlot
from worker.models.layers.moe import MoeNames, RoutedExperts, StackedNames, routing_of
from worker.models.layers.norms import HiddenNorm, RMSNorm


class Gemma4Router:
    """Chooses experts from the residual, after a norm with its own weight.

    Args:
        model: the model that the layer belongs to.
        moe: the layer's experts.
    """

    def __init__(self, model: DecoderModel, moe: MoeConfig) -> None:
        hidden_size, options = model.config.hidden_size, model.options
        self._routing = routing_of(moe)
        self._projection = build_router(hidden_size, {"proj": moe.num_experts}, options)
        self._scale, self._weight_of_experts = (
            torch.empty(size, dtype=torch.float32, device=options.device)
            for size in (hidden_size, moe.num_experts)
        )

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Slots of the projection and both scales; `prefix` ends with a dot."""
        yield from self._projection.weight_slots(prefix)
        for name, tensor in (
            ("scale", self._scale),
            ("per_expert_scale", self._weight_of_experts),
        ):
            yield WeightSlot(
                name=f"{prefix}{name}", destination=tensor, full_shape=tuple(tensor.shape)
            )

    def process_after_loading(self) -> None:
        """Packs the projection after loading, and folds 1 / sqrt(hidden size) into the scale."""
        self._projection.process_after_loading()
        self._scale = self._scale * len(self._scale) ** -0.5

    def norm(self) -> Norm:
        """The norm applied to the residual before the router."""
        return Norm(self._scale, is_fp32=True)

    def forward(self, normed: torch.Tensor) -> ExpertChoice:
        """Experts and their weights per token, from the normalised residual, fp32 [T, hidden]."""
        scores = self._projection.forward(normed)
        return choose_experts(scores, None, self._routing, factors=self._weight_of_experts)


class ParallelExperts:
    """Experts in parallel with an MLP. Router, experts and MLP read the same residual, each after
    its own norm; the outputs of MLP and experts are normalised and added.

    Args:
        model: the model that the layer belongs to.
        moe: the layer's experts.
    """

    def __init__(self, model: DecoderModel, moe: MoeConfig) -> None:
        is_stacked = model.config.quantization is None
        names = MoeNames(stacked=StackedNames() if is_stacked else None)
        self._router = Gemma4Router(model, moe)
        self._experts = RoutedExperts(*(model.config, moe, model.options, names), activation=GELU)
        self._norm_names = (
            "post_feedforward_layernorm_1",
            "pre_feedforward_layernorm_2",
            "post_feedforward_layernorm_2",
        )
        self._norms = [model.build_norm() for _ in self._norm_names]

    def norms(self) -> tuple[Norm, Norm]:
        """The norms applied to the residual before the router and before the experts."""
        return self._router.norm(), self._norms[1].norm()

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Slots of the router, the experts and the norms; `prefix` is the layer's."""
        yield from self._router.weight_slots(f"{prefix}router.")
        yield from self._experts.weight_slots(prefix)
        for name, norm in zip(self._norm_names, self._norms, strict=True):
            yield from norm.weight_slots(f"{prefix}{name}")

    def process_after_loading(self) -> None:
        """Packs the router and the experts after loading."""
        self._router.process_after_loading()
        self._experts.process_after_loading()

    def forward(
        self,
        mlp_output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        after_both: HiddenNorm,
    ) -> torch.Tensor:
        """Adds the outputs of MLP and experts, each after its norm, and normalises the sum.

        Args:
            mlp_output: [T, hidden].
            inputs: [T, hidden] each: the residual after each of `norms`.
            after_both: norm of the sum.

        Returns:
            [T, hidden].
        """
        after_mlp, _, after_experts = self._norms
        routing_input, experts_input = inputs
        routed = self._experts.forward(experts_input, self._router.forward(routing_input))
        (normed,), _ = fused_add_norm(
            *(mlp_output, routed, (after_both.norm(),), after_both.eps),
            x_weight=after_mlp.weight,
            residual_weight=after_experts.weight,
        )
        return normed


class Gemma4Layer(GemmaLayer):
    """A layer with norms before and after each block, possibly experts in parallel with the MLP,
    and an output that is multiplied by a learned number.

    Args:
        model: the model that the layer belongs to.
        index: index of the layer, from 0.
    """

    def __init__(self, model: Gemma4ForCausalLM, index: int) -> None:
        is_full = model.config.windows[index] is None
        traits = AttentionTraits(
            scale=1.0,
            has_value_norm=True,
            values_are_keys=is_full and model.extra("attention_k_eq_v"),
        )
        super().__init__(model, index, model.build_mlp(), traits=traits)
        self._experts: ParallelExperts | None = None
        if model.config.moe is not None:
            self._experts = ParallelExperts(model, model.config.moe)
        self._scalar = torch.empty(1, dtype=model.options.dtype, device=model.options.device)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Slots of the layer; `prefix` ends with a dot."""
        yield from super().weight_slots(prefix)
        if self._experts is not None:
            yield from self._experts.weight_slots(prefix)
        yield WeightSlot(name=f"{prefix}layer_scalar", destination=self._scalar, full_shape=(1,))

    def process_after_loading(self) -> None:
        """Packs the loaded weights, and folds the layer's factor into the weight of the last
        norm."""
        super().process_after_loading()
        if self._experts is not None:
            self._experts.process_after_loading()
        after_mlp = self.norms[-1]
        assert isinstance(after_mlp, RMSNorm), "what build_norm makes"
        after_mlp.multiply(self._scalar)

    def after_mixer(
        self, hidden: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """MLP, and experts if there are any, after attention; as in PreNormLayer."""
        _, after_attention, before_mlp, after_mlp = self.norms
        others = () if self._experts is None else self._experts.norms()
        (hidden, *inputs), residual = fused_add_norm(
            *(hidden, residual, (before_mlp.norm(), *others), before_mlp.eps),
            x_weight=after_attention.weight,
            total_scale=self._scalar,
        )
        hidden = self.mlp.forward(hidden)
        if self._experts is None:
            return after_mlp.forward(hidden), residual
        return self._experts.forward(hidden, inputs, after_mlp), residual


class Gemma4ForCausalLM(Gemma2ForCausalLM):
    """Gemma 4: sliding-window and full-attention layers, norms of q, k and v, soft-capped logits.
    Weights of norms have no offset, unlike in Gemma 1 to 3."""

    norm_offset: ClassVar[float] = 0.0

    def build_layer(self, index: int) -> Gemma4Layer:
        """Builds a layer; they differ in windows, heads and rotary tables only."""
        return Gemma4Layer(self, index)
