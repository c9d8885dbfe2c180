"""Gemma 4 (huggingface.co/google): full-attention layers have wider heads and may use keys as
values; experts run in parallel with the MLP; each layer's output is scaled. E2B and E4B have
per-layer embeddings, and their last layers read the KV caches of earlier ones.

Schema: `config/vendors/google.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from kernels import (
    GELU,
    ExpertChoice,
    Norm,
    choose_experts,
    fused_add_norm,
    gelu_and_mul,
)
from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.gemma import Gemma2ForCausalLM, GemmaLayer
from worker.models.architectures.llama import PreNormLayer
from worker.models.config.model_config import ModelConfig
from worker.models.config.moe_config import MoeConfig
from worker.models.layers.attention import Attention, AttentionTraits, GatedMLP
from worker.models.layers.context import ForwardContext
from worker.models.layers.linear import build_router
from worker.models.layers.linear_method import LayerOptions, WeightSlot
from worker.models.layers.moe import MoeNames, RoutedExperts, StackedNames, routing_of
from worker.models.layers.norms import HiddenNorm, RMSNorm
from worker.models.layers.per_layer_embedding import PerLayerBlock, PerLayerEmbedding
from worker.models.layers.shared_cache import SharedCacheAttention


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
        """Weight slots of the projection, its input's scale and the experts' scales; `prefix` ends
        with a dot."""
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
        """Experts of each token and their weights, given the normalized residual, fp32 [T,
        hidden]."""
        scores = self._projection.forward(normed)
        return choose_experts(scores, None, self._routing, factors=self._weight_of_experts)


class ParallelExperts:
    """Experts in parallel with an MLP. Router, experts and MLP read the same residual, each after
    its own norm; the outputs of the MLP and the experts are normalized and added.

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
        """Weight slots of the router, the experts and the norms; `prefix` is the layer's."""
        yield from self._router.weight_slots(f"{prefix}router.")
        yield from self._experts.weight_slots(prefix)
        for name, norm in zip(self._norm_names, self._norms, strict=True):
            yield from norm.weight_slots(f"{prefix}{name}")

    def process_after_loading(self) -> None:
        """Packs the router and the experts after loading."""
        self._router.process_after_loading()
        self._experts.process_after_loading()

    def forward(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Output of the experts [T, hidden]. `inputs` is the residual after each of `norms`, [T,
        hidden] each."""
        routing_input, experts_input = inputs
        return self._experts.forward(experts_input, self._router.forward(routing_input))

    def add(
        self, mlp_output: torch.Tensor, routed: torch.Tensor, after_both: HiddenNorm
    ) -> torch.Tensor:
        """Normalizes the outputs of the MLP and the experts separately, adds them, and normalizes
        the sum with `after_both`; [T, hidden] each."""
        after_mlp, _, after_experts = self._norms
        (normed,), _ = fused_add_norm(
            *(mlp_output, routed, (after_both.norm(),), after_both.eps),
            x_weight=after_mlp.weight,
            residual_weight=after_experts.weight,
        )
        return normed


class Gemma4Layer(PreNormLayer):
    """A layer with norms before and after each block, whose output is multiplied by a learned
    number. It may have experts in parallel with the MLP, and a block that reads the layer's
    embeddings.

    Args:
        model: the model that the layer belongs to.
        index: 0-based index of the layer.
    """

    norm_names: ClassVar[tuple[str, ...]] = GemmaLayer.norm_names

    def __init__(self, model: Gemma4ForCausalLM, index: int) -> None:
        config, options = model.config, model.options
        attention = model.build_attention(index)
        super().__init__(model, attention, model.build_layer_mlp(index), mixer_name="self_attn")
        self._index = index
        self._experts: ParallelExperts | None = None
        if config.moe is not None:
            self._experts = ParallelExperts(model, config.moe)
        self._per_layer: PerLayerBlock | None = None
        if size := model.extra("hidden_size_per_layer_input"):
            self._per_layer = PerLayerBlock(config, options, size, gelu_and_mul)
        self._scalar = torch.empty(1, dtype=options.dtype, device=options.device)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of the layer; `prefix` ends with a dot."""
        yield from super().weight_slots(prefix)
        if self._experts is not None:
            yield from self._experts.weight_slots(prefix)
        if self._per_layer is not None:
            yield from self._per_layer.weight_slots(prefix)
        yield WeightSlot(name=f"{prefix}layer_scalar", destination=self._scalar, full_shape=(1,))

    def process_after_loading(self) -> None:
        """Packs the loaded weights, and folds the layer's factor into the weight of the last
        norm."""
        super().process_after_loading()
        if self._experts is not None:
            self._experts.process_after_loading()
        last = self.norms[-1]
        if self._per_layer is not None:
            self._per_layer.process_after_loading()
            last = self._per_layer.norm
        assert isinstance(last, RMSNorm), "build_norm returns an RMSNorm"
        last.multiply(self._scalar)

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        ctx: ForwardContext,
        logits_indices: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output of the last block, and the residual to which it has yet to be added; arguments and
        shapes as in DecoderLayer."""
        hidden, residual = super().forward(hidden, residual, positions, ctx, logits_indices)
        if self._per_layer is None or not len(hidden):
            return hidden, residual
        assert ctx.per_layer is not None, "the model computes them"
        embedded = ctx.per_layer[:, self._index]
        if logits_indices is not None:
            embedded = embedded.index_select(0, logits_indices)
        total = hidden if residual is None else hidden + residual
        return self._per_layer.forward(total, embedded), total * self._scalar

    def after_mixer(
        self, hidden: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the MLP, and the experts if there are any, after attention; arguments and result as
        in PreNormLayer."""
        inputs, residual = self.before_blocks(hidden, residual)
        return self.after_blocks(self.run_blocks(inputs)), residual

    def before_blocks(
        self, hidden: torch.Tensor, residual: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Computes the inputs of the MLP and the experts, and the new residual, from the attention
        output and the previous residual; [T, hidden] each."""
        _, after_attention, before_mlp, _ = self.norms
        others = () if self._experts is None else self._experts.norms()
        return fused_add_norm(
            *(hidden, residual, (before_mlp.norm(), *others), before_mlp.eps),
            x_weight=after_attention.weight,
            total_scale=self._scalar if self._per_layer is None else None,
        )

    def run_blocks(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Outputs of the MLP and, if there are any, of the experts, [T, hidden] each."""
        mlp_output = self.mlp.forward(inputs[0])
        if self._experts is None:
            return (mlp_output,)
        return mlp_output, self._experts.forward(inputs[1:])

    def after_blocks(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The layer's output, given the outputs of `run_blocks`."""
        if self._experts is None:
            return self.norms[-1].forward(outputs[0])
        mlp_output, routed = outputs
        return self._experts.add(mlp_output, routed, self.norms[-1])


class SharingModel(Gemma2ForCausalLM):
    """A model that may have per-layer embeddings, and last layers that read the KV caches of
    earlier ones. Weights of norms have no offset, unlike in Gemma 1 to 3."""

    norm_offset: ClassVar[float] = 0.0

    def __init__(self, config: ModelConfig, options: LayerOptions, max_model_len: int) -> None:
        self._owners: dict[int, Attention] = {}
        """Attention blocks that have their own keys and values, by layer."""
        super().__init__(config, options, max_model_len)
        self._first_reader = min(config.cache_sources or (), default=config.num_layers)
        """First layer that reads another layer's cache; the number of layers if there is none."""
        self._per_layer: PerLayerEmbedding | None = None
        if size := self.extra("hidden_size_per_layer_input"):
            vocab_size = self.extra("vocab_size_per_layer_input")
            self._per_layer = PerLayerEmbedding(config, options, vocab_size=vocab_size, size=size)

    def build_attention(self, index: int) -> Attention | SharedCacheAttention:
        """Builds the attention of a layer, with unscaled scores and norms of q, k and v."""
        config, options, table = (
            self.config.for_layer(index),
            self.options,
            self.rotary_table(index),
        )
        source = (self.config.cache_sources or {}).get(index)
        if source is not None:
            scales = self._owners[source].cache_scales
            return SharedCacheAttention(
                *(config, options), source=source, cache_scales=scales, cos_sin=table, scale=1.0
            )
        self._owners[index] = Attention(
            *(config, options),
            layer_index=index,
            cos_sin=table,
            window=self.windows[index],
            traits=AttentionTraits(
                scale=1.0, has_value_norm=True, values_are_keys=self.has_keys_as_values(index)
            ),
        )
        return self._owners[index]

    def has_keys_as_values(self, index: int) -> bool:
        """Whether a layer's keys before norm and rotary embedding are also its values."""
        return False

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Weight slots for all tensors that the checkpoint must contain."""
        yield from super().weight_slots()
        if self._per_layer is not None:
            yield from self._per_layer.weight_slots("model.")

    def process_after_loading(self) -> None:
        """Packs the loaded weights."""
        super().process_after_loading()
        if self._per_layer is not None:
            self._per_layer.process_after_loading()

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        """Forward pass that first adds the per-layer embeddings to the context; arguments and
        result as in DecoderModel."""
        hidden = self.embed(input_ids)
        if self._per_layer is not None:
            ctx = replace(ctx, per_layer=self._per_layer.forward(input_ids, hidden))
        return self.forward_embedded(hidden, positions, ctx)

    def run_layers(
        self, hidden: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs all layers; arguments and result as in DecoderModel. Layers that read other layers'
        caches only compute the tokens in `logits_indices`, since nothing depends on their outputs
        for other tokens."""
        owners, readers = self.layers[: self._first_reader], self.layers[self._first_reader :]
        if not readers:
            return super().run_layers(hidden, positions, ctx)
        residual: torch.Tensor | None = None
        for layer in owners:
            hidden, residual = layer.forward(hidden, residual, positions, ctx)
        if ctx.logits_indices is not None:
            tokens, per_layer = ctx.logits_indices, ctx.per_layer
            hidden, positions = hidden.index_select(0, tokens), positions.index_select(0, tokens)
            residual = None if residual is None else residual.index_select(0, tokens)
            if not len(tokens):
                return hidden, residual
            if per_layer is not None:
                ctx = replace(ctx, per_layer=per_layer.index_select(0, tokens))
        for layer in readers:
            hidden, residual = layer.forward(hidden, residual, positions, ctx)
        return hidden, residual


class Gemma4ForCausalLM(SharingModel):
    """Gemma 4: sliding-window and full-attention layers, norms of q, k and v, and soft-capped
    logits."""

    def build_layer(self, index: int) -> Gemma4Layer:
        """Builds a layer; layers differ only in windows, heads, rotary tables, caches and MLP
        sizes."""
        return Gemma4Layer(self, index)

    def build_layer_mlp(self, index: int) -> GatedMLP:
        """Builds the MLP of a layer, which may be twice as wide if the layer has no keys and values
        of its own."""
        is_wide = self.extra("use_double_wide_mlp") and index in (self.config.cache_sources or ())
        return self.build_mlp(self.config.intermediate_size * (2 if is_wide else 1))

    def has_keys_as_values(self, index: int) -> bool:
        """Whether the layer uses its keys as values; only full-attention layers may."""
        return self.config.windows[index] is None and bool(self.extra("attention_k_eq_v"))
