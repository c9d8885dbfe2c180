"""Nemotron-H and Nemotron 3 (huggingface.co/nvidia): each layer is a single block: Mamba-2,
attention, an MLP or experts.

Schema: `config/vendors/nvidia.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from kernels import SQUARED_RELU, choose_experts, squared_relu
from worker.models.architectures.decoder import DecoderLayer, DecoderModel, FeedForward
from worker.models.architectures.llama import Mixer
from worker.models.config.model_config import ModelConfig
from worker.models.layers.attention import MLP, Attention, AttentionTraits
from worker.models.layers.context import ForwardContext
from worker.models.layers.kv_cache import KVCacheSpec, StateSpec
from worker.models.layers.linear import ColumnParallelLinear, ColumnPart, build_router
from worker.models.layers.linear_method import LayerOptions, WeightSlot
from worker.models.layers.mamba import Mamba2
from worker.models.layers.moe import MoeNames, RoutedExperts, routing_of

_NAMES = MoeNames(bias="gate.e_score_correction_bias")


class LatentExperts:
    """Ungated experts, optionally between projections to a smaller latent space and back, and a
    shared expert.

    Args:
        config: the model's configuration, with experts.
        options: options of the model's layers.
        latent_size: size of the latent space; None if experts read the hidden states directly.
    """

    needs_fp32: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, options: LayerOptions, latent_size: int | None) -> None:
        moe, hidden_size = config.moe, config.hidden_size
        assert moe is not None, "the architecture has experts"
        self._routing = routing_of(moe)
        self._router = build_router(hidden_size, {_NAMES.router: moe.num_experts}, options)
        self._bias = torch.zeros(moe.num_experts, dtype=torch.float32, device=options.device)
        self._to_latent: ColumnParallelLinear | None = None
        self._from_latent: ColumnParallelLinear | None = None
        inner = config
        if latent_size is not None:
            inner = replace(config, hidden_size=latent_size)
            self._to_latent, self._from_latent = (
                ColumnParallelLinear(
                    width,
                    [ColumnPart(name=name, full_size=size, local_size=size, start=0)],
                    bias=config.mlp_bias,
                    options=options,
                )
                for name, width, size in (
                    ("fc1_latent_proj", hidden_size, latent_size),
                    ("fc2_latent_proj", latent_size, hidden_size),
                )
            )
        self._experts = RoutedExperts(inner, moe, options, _NAMES, activation=SQUARED_RELU)
        shared = replace(config, intermediate_size=moe.shared_size)
        self._shared = MLP(shared, options, squared_relu)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of the router, the experts and the projections; `prefix` ends with a dot."""
        yield from self._router.weight_slots(prefix)
        yield WeightSlot(
            name=f"{prefix}{_NAMES.bias}",
            destination=self._bias,
            full_shape=tuple(self._bias.shape),
        )
        yield from self._experts.weight_slots(prefix)
        yield from self._shared.weight_slots(f"{prefix}{_NAMES.shared}.")
        for latent in filter(None, (self._to_latent, self._from_latent)):
            yield from latent.weight_slots(prefix)

    def process_after_loading(self) -> None:
        """Packs the router, the experts and the projections after loading."""
        self._router.process_after_loading()
        self._experts.process_after_loading()
        self._shared.process_after_loading()
        for latent in filter(None, (self._to_latent, self._from_latent)):
            latent.process_after_loading()

    def forward(self, hidden: torch.Tensor, fp32_input: torch.Tensor | None = None) -> torch.Tensor:
        """Maps inputs [T, hidden] to outputs [T, hidden]. The router reads `fp32_input`, the same
        input in fp32."""
        scores = self._router.forward(hidden.float() if fp32_input is None else fp32_input)
        choice = choose_experts(scores, self._bias, self._routing, None)
        inputs = hidden if self._to_latent is None else self._to_latent.forward(hidden)
        routed = self._experts.forward(inputs, choice)
        if self._from_latent is not None:
            routed = self._from_latent.forward(routed)
        return routed + self._shared.forward(hidden)


class MixerLayer:
    """A single-block layer that reads earlier tokens: x + mixer(norm(x)).

    Args:
        model: the model that the layer belongs to.
        mixer: attention, or Mamba-2.
    """

    def __init__(self, model: DecoderModel, mixer: Mixer) -> None:
        self.kv_cache_spec, self.state_spec = mixer.kv_cache_spec, mixer.state_spec
        self._norm, self._mixer = model.build_norm(), mixer

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of the layer; `prefix` ends with a dot."""
        yield from self._mixer.weight_slots(f"{prefix}mixer.")
        yield from self._norm.weight_slots(f"{prefix}norm")

    def process_after_loading(self) -> None:
        """Packs the mixer after loading."""
        self._mixer.process_after_loading()

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        ctx: ForwardContext,
        logits_indices: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output of the mixer, and the residual to which it has yet to be added; arguments and
        shapes as in DecoderLayer."""
        if residual is None:
            residual, hidden = hidden, self._norm.forward(hidden)
        else:
            hidden, residual = self._norm.forward_add(hidden, residual)
        hidden = self._mixer.forward(hidden, positions, ctx, logits_indices)
        if logits_indices is not None:
            residual = residual.index_select(0, logits_indices)
        return hidden, residual


class FeedForwardLayer:
    """A single-block layer that handles each token separately and caches nothing: x + mlp(norm(x)).

    Args:
        model: the model that the layer belongs to.
        mlp: an MLP, or experts.
    """

    def __init__(self, model: DecoderModel, mlp: FeedForward) -> None:
        self.kv_cache_spec: KVCacheSpec | None = None
        """None, since the layer caches no keys and values."""
        self.state_spec: StateSpec | None = None
        """None, since the layer keeps no state."""
        self._norm, self._mlp = model.build_norm(), mlp

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of the layer; `prefix` ends with a dot."""
        yield from self._mlp.weight_slots(f"{prefix}mixer.")
        yield from self._norm.weight_slots(f"{prefix}norm")

    def process_after_loading(self) -> None:
        """Packs the feed-forward block after loading."""
        self._mlp.process_after_loading()

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        ctx: ForwardContext,
        logits_indices: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output of the feed-forward block, and the residual to which it has yet to be added;
        arguments and shapes as in DecoderLayer."""
        if logits_indices is not None:
            hidden = hidden.index_select(0, logits_indices)
            residual = None if residual is None else residual.index_select(0, logits_indices)
            if not len(logits_indices):
                return hidden, residual
        if residual is None:
            return self._mlp.forward(self._norm.forward(hidden)), hidden
        if self._mlp.needs_fp32:
            hidden, residual, wide = self._norm.forward_add_with_fp32(hidden, residual)
            return self._mlp.forward(hidden, wide), residual
        hidden, residual = self._norm.forward_add(hidden, residual)
        return self._mlp.forward(hidden), residual


class HeadBlocks:
    """The layer of an MTP head, which consists of several single-block layers.

    Args:
        blocks: the layers; exactly one has attention, and the others cache nothing.
    """

    def __init__(self, blocks: Sequence[DecoderLayer]) -> None:
        self._blocks = blocks
        specs = [block.kv_cache_spec for block in blocks if block.kv_cache_spec is not None]
        assert len(specs) == 1, "the configuration has one attention block"
        self.kv_cache_spec: KVCacheSpec | None = specs[0]
        """Specification of the KV cache of the block with attention."""
        self.state_spec: StateSpec | None = None
        """None, since the blocks keep no state."""

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of all blocks; `prefix` ends with a dot."""
        for number, block in enumerate(self._blocks):
            yield from block.weight_slots(f"{prefix}{number}.")

    def process_after_loading(self) -> None:
        """Packs the blocks after loading."""
        for block in self._blocks:
            block.process_after_loading()

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
        for block in self._blocks:
            indices = logits_indices if block is self._blocks[-1] else None
            hidden, residual = block.forward(hidden, residual, positions, ctx, indices)
        return hidden, residual


class NemotronHForCausalLM(DecoderModel):
    """Nemotron-H and Nemotron 3: attention has no rotary embedding, and MLPs are ungated."""

    embedding_name: ClassVar[str] = "backbone.embeddings"
    layers_name: ClassVar[str] = "backbone.layers"
    norm_name: ClassVar[str] = "backbone.norm_f"

    def build_layer(self, index: int) -> DecoderLayer:
        """Builds a layer with the kind of block listed in config.json."""
        return self._build(self.extra("layer_kinds")[index], index)

    def build_head_layer(self, index: int) -> HeadBlocks:
        """Builds the blocks of the MTP head, whose attention block has index `index`."""
        return HeadBlocks([self._build(kind, index) for kind in self.extra("head_kinds")])

    def _build(self, kind: str, index: int) -> DecoderLayer:
        config, options = self.config, self.options
        match kind:
            case "linear_attention":
                return MixerLayer(self, Mamba2(config, options, index))
            case "full_attention":
                return MixerLayer(self, self._build_attention(index))
            case "moe":
                latent_size = self.extra("moe_latent_size")
                return FeedForwardLayer(self, LatentExperts(config, options, latent_size))
            case _:
                return FeedForwardLayer(self, MLP(config, options, squared_relu))

    def _build_attention(self, index: int) -> Attention:
        return Attention(
            *(self.config, self.options),
            layer_index=index,
            cos_sin=self.rotary_table(index),
            traits=AttentionTraits(rotates=False),
        )
