"""Per-layer embeddings (PLE) of Gemma 3n and 4: each layer has its own embedding of a token, which
is added to a projection of the model's embedding and read after the MLP."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from worker.models.config.model_config import ModelConfig
from worker.models.layers.linear import (
    ColumnParallelLinear,
    ColumnPart,
    VocabParallelEmbedding,
)
from worker.models.layers.linear_method import LayerOptions, WeightSlot
from worker.models.layers.norms import RMSNorm


class PerLayerEmbedding:
    """Embeddings of tokens for all layers, and a projection of the model's embedding.

    Args:
        config: the model's configuration.
        options: options of the model's layers.
        vocab_size: number of tokens in the table; tokens beyond it have the embedding of token 0.
        size: size of a layer's embedding.
    """

    def __init__(
        self, config: ModelConfig, options: LayerOptions, *, vocab_size: int, size: int
    ) -> None:
        width = config.num_layers * size
        self._size, self._num_layers = size, config.num_layers
        self._last_token = None if vocab_size >= config.vocab_size else vocab_size - 1
        self._table = VocabParallelEmbedding(vocab_size, width, options)
        self._projection = replicated(
            "per_layer_model_projection", config.hidden_size, width, options
        )
        # The norm's input is the projection times 1 / sqrt(hidden size); the factor is folded into
        # eps.
        self._norm = RMSNorm(size, config.rms_norm_eps * config.hidden_size, options)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of table, projection and norm; `prefix` is the model's and ends with a
        dot."""
        yield from self._table.weight_slots(f"{prefix}embed_tokens_per_layer")
        yield from self._projection.weight_slots(prefix)
        yield from self._norm.weight_slots(f"{prefix}per_layer_projection_norm")

    def process_after_loading(self) -> None:
        """Packs the projection, and folds the factor 1 / sqrt(2) of the sum into the norm."""
        self._projection.process_after_loading()
        self._norm.multiply(self._norm.weight.new_full((1,), 0.5).sqrt())

    def forward(self, input_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Maps token ids [T] and their model embeddings [T, hidden] to the layers' inputs
        [T, layers, size]."""
        if self._last_token is not None:
            input_ids = input_ids.masked_fill(input_ids > self._last_token, 0)
        shape = (len(input_ids), self._num_layers, self._size)
        projected = self._norm.forward(self._projection.forward(embedded).view(shape))
        rows = self._table.forward(input_ids).view(shape)
        return torch.add(projected, rows, alpha=(self._size / 2) ** 0.5)


class PerLayerBlock:
    """The block of a layer that reads its per-layer embedding e:
    norm(projection(activation(gate x) * e)).

    Args:
        config: the model's configuration.
        options: options of the model's layers.
        size: size of a layer's embedding.
        activate: gated activation, which maps gate and e [T, 2 * size] to [T, size].
    """

    def __init__(
        self,
        config: ModelConfig,
        options: LayerOptions,
        size: int,
        activate: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._activate = activate
        self._gate = replicated("per_layer_input_gate", config.hidden_size, size, options)
        self._projection = replicated("per_layer_projection", size, config.hidden_size, options)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, options)
        """Norm of the block's output."""

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of gate, projection and norm; `prefix` is the layer's and ends with a
        dot."""
        yield from self._gate.weight_slots(prefix)
        yield from self._projection.weight_slots(prefix)
        yield from self.norm.weight_slots(f"{prefix}post_per_layer_input_norm")

    def process_after_loading(self) -> None:
        """Packs the projections after loading."""
        self._gate.process_after_loading()
        self._projection.process_after_loading()

    def forward(self, x: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Maps x [T, hidden] and the layer's embeddings [T, size] to [T, hidden]."""
        both = torch.cat((self._gate.forward(x), embedded), dim=-1)
        return self.norm.forward(self._projection.forward(self._activate(both)))


def replicated(
    name: str, in_features: int, out_features: int, options: LayerOptions
) -> ColumnParallelLinear:
    """A small projection without bias that every rank computes in full, since exchanging its output
    would cost more."""
    part = ColumnPart(name=name, full_size=out_features, local_size=out_features, start=0)
    return ColumnParallelLinear(in_features, [part], bias=False, options=options)
