"""Llama's layers, which Mistral, Qwen2, Qwen3 and SDAR share: they differ in biases and norms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from worker.models.context import ForwardContext
from worker.models.decoder import DecoderModel, FeedForward
from worker.models.layers import Attention, AttentionNames, GatedMLP, RMSNorm
from worker.models.linear_method import WeightSlot


class LlamaLayer:
    """Attention and feed-forward, each behind a norm and beside a residual:
    x + attention(norm(x)), then x + mlp(norm(x)).

    Args:
        model: whose layer it is.
        index: of the layer, from 0.
        mlp: what follows attention.
        attention_scale: factor of the products of queries and keys; None for head_dim ** -0.5.
        attention_name: what a checkpoint calls the attention block of a layer.
        names: what it calls the parts of that; None for Llama's names.
    """

    def __init__(
        self,
        model: DecoderModel,
        index: int,
        mlp: FeedForward,
        *,
        attention_scale: float | None = None,
        attention_name: str = "self_attn",
        names: AttentionNames | None = None,
    ) -> None:
        config, options = model.config, model.options
        self.attention = Attention(
            *(config, options),
            layer_index=index,
            cos_sin=model.cos_sin,
            window=model.windows[index],
            scale=attention_scale,
            names=names,
        )
        self.kv_cache_spec = self.attention.kv_cache_spec
        self.mlp = mlp
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, options)
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, options)
        self._attention_name = attention_name

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Slots of the layer; `prefix` ends with a dot."""
        yield from self.attention.weight_slots(f"{prefix}{self._attention_name}.")
        yield from self.mlp.weight_slots(f"{prefix}mlp.")
        yield from self.input_norm.weight_slots(f"{prefix}input_layernorm")
        yield from self.post_attention_norm.weight_slots(f"{prefix}post_attention_layernorm")

    def pack(self) -> None:
        """Brings the loaded weights into the form they are used in."""
        self.attention.pack()
        self.mlp.pack()

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        ctx: ForwardContext,
        read: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the block's output and the residual that it is still to be added to.

        Where no layer follows, `read` may name the tokens [S] that this is needed of.
        """
        if residual is None:
            residual, hidden = hidden, self.input_norm.forward(hidden)
        else:
            hidden, residual = self.input_norm.forward_add(hidden, residual)
        hidden = self.attention.forward(hidden, positions, ctx, read)
        if read is not None:
            residual = residual.index_select(0, read)
            if not len(read):
                return hidden, residual
        hidden, residual = self.post_attention_norm.forward_add(hidden, residual)
        return self.mlp.forward(hidden), residual


class LlamaForCausalLM(DecoderModel):
    """Grouped-query attention and a SiLU-gated MLP; biases and the norms of q and k follow the
    configuration."""

    runs_natively: ClassVar[bool] = True

    def build_layer(self, index: int) -> LlamaLayer:
        """Every layer is alike."""
        return LlamaLayer(self, index, GatedMLP(self.config, self.options))
