"""Self-conditioning of canvases: the embeddings of a canvas are combined with the average
embeddings of the previous round's distributions."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels import GELU
from worker.models.config.model_config import ModelConfig
from worker.models.layers.attention import GatedMLP
from worker.models.layers.linear_method import LayerOptions, WeightSlot
from worker.models.layers.norms import RMSNorm


class SelfConditioning:
    """Computes norm(embedding + mlp(norm(signal))); the outer norm has no weight.

    Args:
        config: the model's configuration.
        options: options of the model's layers.
    """

    def __init__(self, config: ModelConfig, options: LayerOptions) -> None:
        self._pre_norm, self._post_norm = (
            RMSNorm(config.hidden_size, config.rms_norm_eps, options) for _ in range(2)
        )
        self._post_norm.weight.fill_(1.0)
        self._mlp = GatedMLP(config, options, activate=GELU)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of the first norm and the projections; `prefix` ends with a dot."""
        yield from self._pre_norm.weight_slots(f"{prefix}pre_norm")
        yield from self._mlp.weight_slots(prefix)

    def process_after_loading(self) -> None:
        """Packs the projections after loading."""
        self._mlp.process_after_loading()

    def forward(self, embedded: torch.Tensor, signal: torch.Tensor) -> torch.Tensor:
        """Computes the first layer's input from token embeddings and the signal, all [T,
        hidden]."""
        conditioning = self._mlp.forward(self._pre_norm.forward(signal))
        return self._post_norm.forward_add(conditioning, embedded)[0]
