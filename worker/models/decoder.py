"""The decoder that all dense architectures share; they differ in the blocks they build."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, Protocol

import torch

from kernels.native import NativeDecoder
from worker.models.config import ModelConfig
from worker.models.context import ForwardContext
from worker.models.layers import Attention, RMSNorm
from worker.models.linear import (
    LayerOptions,
    ParallelLMHead,
    VocabParallelEmbedding,
    WeightSlot,
)
from worker.models.rope import cos_sin_table


class FeedForward(Protocol):
    """What follows attention in a layer."""

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Slots of all its weights; `prefix` ends with a dot."""
        ...

    def pack(self) -> None:
        """Brings the weights into the form they are used in, once they are loaded."""
        ...

    def drop(self) -> None:
        """Lets go of the weights: others hold them now."""
        ...

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden] to [T, hidden]."""
        ...


class DecoderLayer:
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(
        self, attention: Attention, mlp: FeedForward, config: ModelConfig, options: LayerOptions
    ) -> None:
        self.attention = attention
        self.mlp = mlp
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, options)
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, options)

    def weight_slots(self, prefix: str, attention_name: str) -> Iterator[WeightSlot]:
        """Slots of the layer; `prefix` ends with a dot."""
        yield from self.attention.weight_slots(f"{prefix}{attention_name}.")
        yield from self.mlp.weight_slots(f"{prefix}mlp.")
        yield from self.input_norm.weight_slots(f"{prefix}input_layernorm")
        yield from self.post_attention_norm.weight_slots(f"{prefix}post_attention_layernorm")

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


class DecoderModel(ABC):
    """A decoder-only language model on one rank."""

    embedding_name: ClassVar[str] = "model.embed_tokens"
    attention_name: ClassVar[str] = "self_attn"

    def __init__(self, config: ModelConfig, options: LayerOptions, max_model_len: int) -> None:
        self.config = config
        self.options = options
        self.native: NativeDecoder | None = None
        """Runs the whole forward pass in place of the layers here, where it is used."""
        self.cos_sin = cos_sin_table(config.rope, config.rotary_dim, max_model_len, options.device)
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, options)
        self.layers = [
            DecoderLayer(self.build_attention(index), self.build_mlp(index), config, options)
            for index in range(config.num_layers)
        ]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, options)
        self.lm_head = ParallelLMHead(
            config.vocab_size, config.hidden_size, options, tied=config.tie_word_embeddings
        )

    @abstractmethod
    def build_attention(self, layer_index: int) -> Attention:
        """The attention block of one layer."""

    @abstractmethod
    def build_mlp(self, layer_index: int) -> FeedForward:
        """The feed-forward block of one layer."""

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Every tensor that the checkpoint must hold."""
        yield from self.embed_tokens.weight_slots(self.embedding_name)
        for index, layer in enumerate(self.layers):
            yield from layer.weight_slots(f"model.layers.{index}.", self.attention_name)
        yield from self.norm.weight_slots("model.norm")
        yield from self.lm_head.weight_slots("lm_head")

    def pack(self) -> None:
        """Brings the weights into the form torch uses, or drops what `native` has of them."""
        if self.native is not None:
            self.lm_head.drop()
            return
        for layer in self.layers:
            layer.attention.pack()
            layer.mlp.pack()
        self.lm_head.pack(self.embed_tokens)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        """Token ids [T] and positions [T] (int64) to normalised hidden states [T, hidden].

        Where the context says which tokens are read, [S, hidden] of these.
        """
        hidden = self.embed_tokens.forward(input_ids)
        residual = None
        for layer in self.layers:
            read = ctx.read_tokens if layer is self.layers[-1] else None
            hidden, residual = layer.forward(hidden, residual, positions, ctx, read)
        assert residual is not None, "a model has layers"
        return self.norm.forward_add(hidden, residual)[0] if len(hidden) else hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states of the rows that sample [R, hidden] to fp32 logits [R, vocab_size]."""
        if self.native is not None:
            return self.lm_head.gather(self.native.logits(hidden))
        return self.lm_head.forward(hidden)
