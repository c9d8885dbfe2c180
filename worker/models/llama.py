"""Llama's layers, which Mistral, Qwen2, Qwen3 and SDAR share: they differ in biases and norms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Protocol

import torch

from worker.models.context import ForwardContext
from worker.models.decoder import DecoderModel, FeedForward, Part
from worker.models.kv_cache import KVCacheSpec, StateSpec
from worker.models.layers import Attention, AttentionTraits, GatedMLP
from worker.models.linear_method import WeightSlot


class Mixer(Part, Protocol):
    """The part of a layer by which positions know of others."""

    kv_cache_spec: KVCacheSpec | StateSpec
    """Specification of what it keeps of a token, or of a request."""

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        ctx: ForwardContext,
        read: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, hidden] to [T, hidden], or to [S, hidden] of the tokens `read`."""
        ...


class PreNormLayer:
    """A mixer of positions and feed-forward, each behind a norm and beside a residual:
    x + mixer(norm(x)), then x + mlp(norm(x)).

    Args:
        model: whose layer it is.
        mixer: attention, or what stands in its place.
        mlp: what follows it.
        mixer_name: what a checkpoint calls the mixer of a layer.
        mlp_name: what it calls what follows that.
    """

    norm_names: ClassVar[tuple[str, ...]] = ("input_layernorm", "post_attention_layernorm")
    """Names of its norms in a checkpoint, in the order in which they are applied."""

    def __init__(
        self,
        model: DecoderModel,
        mixer: Mixer,
        mlp: FeedForward,
        *,
        mixer_name: str,
        mlp_name: str = "mlp",
    ) -> None:
        self.kv_cache_spec = mixer.kv_cache_spec
        self.mlp = mlp
        self.norms = [model.build_norm() for _ in self.norm_names]
        self._reads_wide = mlp.reads_wide
        self._mixer = mixer
        self._mixer_name, self._mlp_name = mixer_name, mlp_name

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Slots of the layer; `prefix` ends with a dot."""
        yield from self._mixer.weight_slots(f"{prefix}{self._mixer_name}.")
        yield from self.mlp.weight_slots(f"{prefix}{self._mlp_name}.")
        for name, norm in zip(self.norm_names, self.norms, strict=True):
            yield from norm.weight_slots(f"{prefix}{name}")

    def pack(self) -> None:
        """Brings the loaded weights into the form they are used in."""
        self._mixer.pack()
        self.mlp.pack()

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        ctx: ForwardContext,
        read: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The block's output and the residual that it is still to be added to.

        Where no layer follows, `read` may name the tokens [S] that this is needed of.
        """
        before = self.norms[0]
        if residual is None:
            residual, hidden = hidden, before.forward(hidden)
        else:
            hidden, residual = before.forward_add(hidden, residual)
        hidden = self._mixer.forward(hidden, positions, ctx, read)
        if read is not None:
            residual = residual.index_select(0, read)
            if not len(read):
                return hidden, residual
        return self.after_mixer(hidden, residual)

    def after_mixer(
        self, hidden: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `forward` returns, from the mixer's output and the residual, both [T, hidden]."""
        post_attention_norm = self.norms[1]
        if not self._reads_wide:
            hidden, residual = post_attention_norm.forward_add(hidden, residual)
            return self.feed_forward(hidden), residual
        hidden, residual, wide = post_attention_norm.forward_add_wide(hidden, residual)
        return self.feed_forward(hidden, wide), residual

    def feed_forward(self, hidden: torch.Tensor, wide: torch.Tensor | None = None) -> torch.Tensor:
        """The part that follows attention: [T, hidden], normalised, to [T, hidden]; `wide` is the
        same input in fp32, where anything reads it."""
        return self.mlp.forward(hidden, wide)


class LlamaLayer(PreNormLayer):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    Args:
        model: whose layer it is.
        index: of the layer, from 0.
        mlp: what follows attention.
        traits: how its attention differs from Llama's.
        attention_name: what a checkpoint calls the attention block of a layer.
        mlp_name: what it calls what follows that.
    """

    def __init__(
        self,
        model: DecoderModel,
        index: int,
        mlp: FeedForward,
        *,
        traits: AttentionTraits = AttentionTraits(),  # noqa: B008  # frozen
        attention_name: str = "self_attn",
        mlp_name: str = "mlp",
    ) -> None:
        self.attention = Attention(
            *(model.config.for_layer(index), model.options),
            layer_index=index,
            cos_sin=model.rotary_table(index),
            window=model.windows[index],
            traits=traits,
        )
        super().__init__(model, self.attention, mlp, mixer_name=attention_name, mlp_name=mlp_name)


class LlamaForCausalLM(DecoderModel):
    """Grouped-query attention and a SiLU-gated MLP; biases and the norms of q and k follow the
    configuration."""

    runs_natively: ClassVar[bool] = True

    def build_layer(self, index: int) -> LlamaLayer:
        """Every layer is alike."""
        return LlamaLayer(self, index, GatedMLP(self.config, self.options))
