"""DiffusionGemma (huggingface.co/google): Gemma 4 with experts, used both as a causal encoder of
known tokens, which writes the KV cache, and as a bidirectional decoder of canvases. Encoder and
decoder only differ in the layers' output factors and in self-conditioning, which only the decoder
has.

Schema: `config/vendors/google.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import ClassVar

import torch

from worker.models.architectures.gemma4 import Gemma4ForCausalLM, Gemma4Layer
from worker.models.config.model_config import ModelConfig
from worker.models.layers.context import ForwardContext
from worker.models.layers.linear_method import LayerOptions, WeightSlot
from worker.models.layers.norms import RMSNorm
from worker.models.layers.self_conditioning import SelfConditioning


class DiffusionGemmaLayer(Gemma4Layer):
    """Gemma 4's layer with two output factors: one for canvases, and one for known tokens.

    Args:
        model: the model that the layer belongs to.
        index: 0-based index of the layer.
    """

    def __init__(self, model: DiffusionGemmaForBlockDiffusion, index: int) -> None:
        super().__init__(model, index)
        self._encoder_scalar = torch.empty_like(self._scalar)
        self._encoder: DiffusionGemmaLayer | None = None
        """The same layer with the factor for known tokens; None before the weights are loaded."""

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of the layer; `prefix` ends with a dot."""
        yield from super().weight_slots(prefix)
        yield WeightSlot(
            name=f"model.encoder.language_model.layers.{self._index}.layer_scalar",
            destination=self._encoder_scalar,
            full_shape=(1,),
        )

    def process_after_loading(self) -> None:
        """Packs the loaded weights, and folds each factor into the last norm."""
        *others, last = self.norms
        assert isinstance(last, RMSNorm), "build_norm returns an RMSNorm"
        encoder_last = copy(last)
        super().process_after_loading()
        encoder = copy(self)
        encoder._scalar = self._encoder_scalar
        encoder_last.multiply(encoder._scalar)
        encoder.norms = [*others, encoder_last]
        self._encoder = encoder

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
        hidden, residual = self.mix(hidden, residual, positions, ctx, logits_indices)
        num_known = len(hidden) - (0 if ctx.signal is None else len(ctx.signal))
        encoder = self._encoder
        if not num_known or encoder is None:
            return self.after_mixer(hidden, residual) if len(hidden) else (hidden, residual)
        if ctx.signal is None:
            return encoder.after_mixer(hidden, residual)
        # Both: only the factors differ, so MLP and experts run once.
        parts = zip(
            *(
                (encoder, self),
                hidden.tensor_split([num_known]),
                residual.tensor_split([num_known]),
            ),
            strict=True,
        )
        before = [layer.before_blocks(rows, before) for layer, rows, before in parts]
        inputs = [torch.cat(pair) for pair in zip(*(rows for rows, _ in before), strict=True)]
        outputs = [rows.tensor_split([num_known]) for rows in self.run_blocks(inputs)]
        known, canvases = zip(*outputs, strict=True)
        after = encoder.after_blocks(known), self.after_blocks(canvases)
        return torch.cat(after), torch.cat([residual for _, residual in before])


class DiffusionGemmaForBlockDiffusion(Gemma4ForCausalLM):
    """DiffusionGemma: Gemma 4's layers without per-layer embeddings or shared caches."""

    embedding_name: ClassVar[str] = "model.decoder.embed_tokens"
    layers_name: ClassVar[str] = "model.decoder.layers"
    norm_name: ClassVar[str] = "model.decoder.norm"

    def __init__(self, config: ModelConfig, options: LayerOptions, max_model_len: int) -> None:
        super().__init__(config, options, max_model_len)
        self._conditioning = SelfConditioning(config, options)

    def build_layer(self, index: int) -> DiffusionGemmaLayer:
        """Builds a layer; layers differ only in windows, heads and rotary tables."""
        return DiffusionGemmaLayer(self, index)

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Weight slots for all tensors that the checkpoint must contain."""
        yield from super().weight_slots()
        yield from self._conditioning.weight_slots("model.decoder.self_conditioning.")

    def process_after_loading(self) -> None:
        """Packs the loaded weights."""
        super().process_after_loading()
        self._conditioning.process_after_loading()

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        """Runs the model on known tokens and, if the context has a self-conditioning signal, on
        canvases; arguments and result as in DecoderModel."""
        hidden = self.embed(input_ids)
        if ctx.signal is not None:
            num_known = len(hidden) - len(ctx.signal)
            canvases = self._conditioning.forward(hidden[num_known:], ctx.signal)
            hidden = torch.cat((hidden[:num_known], canvases)) if num_known else canvases
        return self.forward_embedded(hidden, positions, ctx)
