"""Classification heads of pooling models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch

from kernels import rowwise
from worker.models.config.model_config import ModelConfig
from worker.models.layers.linear_method import LayerOptions, WeightSlot


class PoolingHead(Protocol):
    """Head that computes the logits of labels from pooled hidden states; replicated on every
    rank."""

    def weight_slots(self, lm_head: str) -> Iterator[WeightSlot]:
        """Slots of the head's weights; `lm_head` is the name of the LM head."""
        ...

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        """Maps pooled hidden states, fp64 [n, hidden], to logits, fp64 [n, labels]."""
        ...


class LinearHead:
    """The head of a decoder: a linear layer without bias, or rows of the LM head.

    Args:
        config: configuration of a classification model.
        options: options of the model's layers.
    """

    def __init__(self, config: ModelConfig, options: LayerOptions) -> None:
        assert config.pooling is not None, "a model that generates text has an LM head instead"
        self._token_ids = config.pooling.token_ids
        self._vocab_size = config.vocab_size
        self.weight = torch.empty(
            *(config.pooling.info.size, config.hidden_size),
            dtype=torch.float32,
            device=options.device,
        )

    def weight_slots(self, lm_head: str) -> Iterator[WeightSlot]:
        """Weight slots of the head: `score.weight`, or rows of the LM head, whose name is
        `lm_head`."""
        if not self._token_ids:
            yield WeightSlot(
                name="score.weight", destination=self.weight, full_shape=tuple(self.weight.shape)
            )
        for label, token_id in enumerate(self._token_ids):
            yield WeightSlot(
                name=f"{lm_head}.weight",
                destination=self.weight[label : label + 1],
                full_shape=(self._vocab_size, self.weight.shape[1]),
                start=token_id,
            )

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        """Maps pooled hidden states, fp64 [n, hidden], to logits, fp64 [n, labels]."""
        # HAZARD(invariance): one matmul per row, since sums may depend on the number of rows.
        weight = self.weight.double()
        return torch.stack([weight @ row for row in pooled])


class DenseHead:
    """The head of an encoder: a linear layer, tanh, and a linear layer, with biases.

    Args:
        config: configuration of a classification model.
        options: options of the model's layers.
        dense: name of the first layer in a checkpoint.
        output: name of the second layer in a checkpoint.
    """

    def __init__(self, config: ModelConfig, options: LayerOptions, dense: str, output: str) -> None:
        assert config.pooling is not None, "a model that generates text has an LM head instead"
        size, labels = config.hidden_size, config.pooling.info.size
        shapes = {
            f"{dense}.weight": (size, size),
            f"{dense}.bias": (size,),
            f"{output}.weight": (labels, size),
            f"{output}.bias": (labels,),
        }
        self._weights = _empty(shapes, options)

    def weight_slots(self, lm_head: str) -> Iterator[WeightSlot]:
        """Weight slots of the two layers; a model with this head has no LM head."""
        return _slots(self._weights)

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        """Maps pooled hidden states, fp64 [n, hidden], to logits, fp64 [n, labels]."""
        # HAZARD(invariance): one matmul per row, since sums may depend on the number of rows.
        dense, dense_bias, output, bias = (one.double() for one in self._weights.values())
        rows = [output @ torch.tanh(dense @ row + dense_bias) + bias for row in pooled]
        return torch.stack(rows)


class NormedHead:
    """ModernBERT's head: a linear layer and GELU, a LayerNorm, and a linear layer with a bias.

    Args:
        config: configuration of a classification model.
        options: options of the model's layers.
    """

    def __init__(self, config: ModelConfig, options: LayerOptions) -> None:
        assert config.pooling is not None, "a model that generates text has an LM head instead"
        size, labels = config.hidden_size, config.pooling.info.size
        self._eps = config.rms_norm_eps
        shapes = {
            "head.dense.weight": (size, size),
            "head.norm.weight": (size,),
            "classifier.weight": (labels, size),
            "classifier.bias": (labels,),
        }
        self._weights = _empty(shapes, options)

    def weight_slots(self, lm_head: str) -> Iterator[WeightSlot]:
        """Weight slots of all layers; a model with this head has no LM head."""
        return _slots(self._weights)

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        """Maps pooled hidden states, fp64 [n, hidden], to logits, fp64 [n, labels]."""
        # HAZARD(invariance): one matmul per row, since sums may depend on the number of rows.
        dense, norm, output, bias = (one.double() for one in self._weights.values())
        rows = []
        for row in pooled:
            inner = rowwise.gelu(dense @ row)
            inner = torch.nn.functional.layer_norm(inner, norm.shape, norm, eps=self._eps)
            rows.append(output @ inner + bias)
        return torch.stack(rows)


def _empty(shapes: Mapping[str, tuple[int, ...]], options: LayerOptions) -> dict[str, torch.Tensor]:
    """Uninitialized fp32 weights by name, replicated on every rank."""
    return {
        name: torch.empty(shape, dtype=torch.float32, device=options.device)
        for name, shape in shapes.items()
    }


def _slots(weights: Mapping[str, torch.Tensor]) -> Iterator[WeightSlot]:
    """Weight slots for the given weights, keyed by name."""
    for name, weight in weights.items():
        yield WeightSlot(name=name, destination=weight, full_shape=tuple(weight.shape))
