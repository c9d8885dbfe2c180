"""LongCat-Flash (huggingface.co/meituan-longcat): pairs of layers with experts in parallel.

Schema: `config/vendors/meituan.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from kernels import ExpertChoice
from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.deepseek import LatentAttention
from worker.models.architectures.llama import PreNormLayer
from worker.models.layers.attention import GatedMLP
from worker.models.layers.context import ForwardContext
from worker.models.layers.linear_method import WeightSlot
from worker.models.layers.moe import MoeMLP, MoeNames

_NAMES = MoeNames(router="router.classifier", bias="router.e_score_correction_bias")


class LongcatFlashForCausalLM(DecoderModel):
    """LongCat-Flash: one layer of a checkpoint corresponds to a pair of layers, each with its own
    KV cache."""

    def build_layer(self, index: int) -> PreNormLayer:
        """Builds the first or the second layer of a pair."""
        if index % 2 == 0:
            self._first = FirstHalf(self, index)
            return self._first
        return SecondHalf(self, index, self._first)

    def build_head_layer(self, index: int) -> PreNormLayer:
        """Builds the MTP head's layer: latent attention and an MLP."""
        attention = ScaledLatentAttention.of(self, index)
        mlp = GatedMLP(self.config, self.options)
        names = {"mixer_name": "self_attn", "mlp_name": "transformer_layer.mlp"}
        return PreNormLayer(self, attention, mlp, **names)

    def layer_name(self, index: int) -> str:
        """Checkpoint name of the pair that a layer belongs to."""
        return super().layer_name(index // 2)


class ScaledLatentAttention(LatentAttention):
    """Latent attention that multiplies normalized latents by sqrt(hidden size / latent size)."""

    def process_after_loading(self) -> None:
        """Packs the weights after loading, and folds the factors into the norms' weights."""
        super().process_after_loading()
        for norm in (self.q_norm, self.kv_norm):
            assert norm is not None, "the architecture has latents of queries"
            norm.weight = norm.weight.float() * (self._hidden_size / len(norm.weight)) ** 0.5


class FirstHalf(PreNormLayer):
    """First layer of a pair, which owns the experts. The experts read the same input as the layer's
    MLP, and their output is added after the second layer. The first layer runs the router and the
    second layer the experts, so that one all-reduce covers the experts and the second layer's MLP.
    """

    norm_names: ClassVar[tuple[str, ...]] = ("input_layernorm.0", "post_attention_layernorm.0")

    def __init__(self, model: DecoderModel, index: int) -> None:
        self.experts = MoeMLP(model.config, model.options, _NAMES)
        attention = ScaledLatentAttention.of(model, index)
        mlp = GatedMLP(model.config, model.options)
        super().__init__(model, attention, mlp, mixer_name="self_attn.0", mlp_name="mlps.0")
        self._needs_fp32 = self.experts.needs_fp32
        self.chosen: tuple[torch.Tensor, ExpertChoice] | None = None
        """Input [T, hidden] of the experts and the router's choice, kept until the second layer
        consumes them."""

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of the layer and of the experts; `prefix` ends with a dot."""
        yield from super().weight_slots(prefix)
        yield from self.experts.weight_slots(f"{prefix}mlp.")

    def process_after_loading(self) -> None:
        """Packs the layer and the experts after loading."""
        super().process_after_loading()
        self.experts.process_after_loading()

    def feed_forward(
        self, hidden: torch.Tensor, fp32_input: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Chooses experts and runs the MLP on normalized hidden states [T, hidden]."""
        self.chosen = hidden, self.experts.choose(hidden, fp32_input)
        return super().feed_forward(hidden)


class SecondHalf(PreNormLayer):
    """Second layer of a pair, which runs its MLP and the experts owned by the first layer."""

    norm_names: ClassVar[tuple[str, ...]] = ("input_layernorm.1", "post_attention_layernorm.1")

    def __init__(self, model: DecoderModel, index: int, first: FirstHalf) -> None:
        attention = ScaledLatentAttention.of(model, index)
        self._dense = GatedMLP(model.config, model.options)
        super().__init__(model, attention, self._dense, mixer_name="self_attn.1", mlp_name="mlps.1")
        self._first = first

    def process_after_loading(self) -> None:
        """Packs the layer after loading."""
        super().process_after_loading()
        self._fp8_mlp = None  # the experts run along with the MLP

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        ctx: ForwardContext,
        logits_indices: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output of the MLP and the experts, and the residual to which it has yet to be added;
        arguments and shapes as in DecoderLayer."""
        if logits_indices is not None:
            assert self._first.chosen is not None, "the first half runs before the second"
            inputs, choice = self._first.chosen
            selected = ExpertChoice(*(part.index_select(0, logits_indices) for part in choice))
            self._first.chosen = inputs.index_select(0, logits_indices), selected
        return super().forward(hidden, residual, positions, ctx, logits_indices)

    def feed_forward(
        self, hidden: torch.Tensor, fp32_input: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Runs the MLP and the chosen experts on normalized hidden states [T, hidden]."""
        chosen, self._first.chosen = self._first.chosen, None
        assert chosen is not None, "the first half runs before the second"
        return self._first.experts.run(*chosen, self._dense.forward_share(hidden))
