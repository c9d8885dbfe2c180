"""Head for multi-token prediction (MTP), whose predictions are the drafts of speculative decoding.

Names and differences between families: `config/mtp_config.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

import torch

from kernels.native import NativeHead
from worker.models.config.model_config import ModelConfig
from worker.models.config.mtp_config import MtpConfig
from worker.models.layers.context import ForwardContext
from worker.models.layers.kv_cache import CachingLayer
from worker.models.layers.linear import (
    ColumnParallelLinear,
    ParallelLMHead,
    VocabParallelEmbedding,
    whole_part,
)
from worker.models.layers.linear_method import LayerOptions, UnquantizedMethod, WeightSlot
from worker.models.layers.norms import HiddenNorm


class HeadLayer(CachingLayer, Protocol):
    """The decoder layer of a head, of the same kind as the model's (`decoder.DecoderLayer`)."""

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Slots of all weights of the layer; `prefix` ends with a dot."""
        ...

    def process_after_loading(self) -> None:
        """Converts the loaded weights to the form in which they are used."""
        ...

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        ctx: ForwardContext,
        logits_indices: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output and residual; arguments and shapes as in `DecoderLayer.forward`."""
        ...


class MtpHead:
    """Predicts the token after the next one: at position i, it reads the model's hidden state after
    the final norm, and the embedding of the token at position i + 1.

    As in vLLM, the layer's keys and values belong to position i.

    Args:
        mtp: names and properties of the head.
        layer: the head's decoder layer.
        layer_index: index of `layer`; the indices of heads' layers follow those of the model's.
        build_norm: the model's `build_norm`.
        config: the model's configuration.
        options: options of the model's layers.
    """

    def __init__(
        self,
        mtp: MtpConfig,
        layer: HeadLayer,
        layer_index: int,
        build_norm: Callable[[], HiddenNorm],
        config: ModelConfig,
        options: LayerOptions,
    ) -> None:
        self.mtp = mtp
        self.layer_index = layer_index
        """Index of the head's layer among the model's."""
        self.further: tuple[MtpHead, ...] = ()
        """Additional heads, in order; each predicts one more token (`MtpConfig.further`)."""
        self.layer = layer
        """The head's decoder layer."""
        self.hidden_size = config.hidden_size
        self.embedding_norm, self.hidden_norm, self.final_norm = (build_norm() for _ in range(3))
        self.lm_head: ParallelLMHead | None = None
        """The head's LM head; None if it uses the model's."""
        if mtp.lm_head:
            sizes = config.vocab_size, config.hidden_size
            self.lm_head = ParallelLMHead(*sizes, options, tied=False)
        self.native: NativeHead | None = None
        """The head in the compiled CPU library; None if torch runs it."""
        # Replicated: it is small. Quantized checkpoints store it unquantized.
        self.projection = ColumnParallelLinear(
            2 * config.hidden_size,
            [whole_part(mtp.projection, config.hidden_size)],
            bias=False,
            options=replace(options, linear_method=UnquantizedMethod()),
        )

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Weight slots for all tensors of this head and of the additional ones."""
        yield from self.embedding_norm.weight_slots(self.mtp.embedding_norm)
        yield from self.hidden_norm.weight_slots(self.mtp.hidden_norm)
        yield from self.projection.weight_slots("")
        yield from self.layer.weight_slots(self.mtp.layer)
        yield from self.final_norm.weight_slots(self.mtp.final_norm)
        if self.lm_head is not None:
            yield from self.lm_head.weight_slots(self.mtp.lm_head)
        for head in self.further:
            yield from head.weight_slots()

    def process_after_loading(self, embedding: VocabParallelEmbedding) -> None:
        """Packs the projection, the layer and the LM head of this head and of the additional
        ones, unless `native` holds the weights.

        Args:
            embedding: the model's embedding.
        """
        if self.native is not None:
            return
        self.projection.process_after_loading()
        self.layer.process_after_loading()
        if self.lm_head is not None:
            self.lm_head.process_after_loading(embedding)
        for head in self.further:
            head.process_after_loading(embedding)

    def forward(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        ctx: ForwardContext,
        logits_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes outputs [T, hidden], or [S, hidden] for the tokens in `logits_indices`. They are
        inputs of `compute_logits` and of predictions of further tokens.

        Args:
            embedded: [T, hidden]: embeddings of the tokens after `positions`.
            hidden: [T, hidden]: hidden states of the model at `positions`, or outputs of an earlier
                call of this head or of the head before it.
            positions: [T] int64.
            ctx: caches and planned attention of the step, including those of `layer_index`.
            logits_indices: int64 [S], ascending: tokens whose outputs are needed; None for all.
        """
        if self.mtp.zeroes_first:
            embedded = embedded.masked_fill((positions == 0).unsqueeze(1), 0.0)
        parts = [self.embedding_norm.forward(embedded), self.hidden_norm.forward(hidden)]
        if self.mtp.hidden_first:
            parts.reverse()
        mixed = self.projection.forward(torch.cat(parts, dim=-1))
        out, residual = self.layer.forward(mixed, None, positions, ctx, logits_indices)
        if residual is not None:
            out = out + residual
        return self.final_norm.forward(out) if self.mtp.recycles_normed else out

    def compute_logits(
        self, outputs: torch.Tensor, shared: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Maps outputs [R, hidden] to fp32 logits [R, vocab_size].

        Args:
            outputs: [R, hidden]: from `forward`.
            shared: the model's LM head, used if the head has none of its own.
        """
        hidden = outputs if self.mtp.recycles_normed else self.final_norm.forward(outputs)
        return shared(hidden) if self.lm_head is None else self.lm_head.forward(hidden)
