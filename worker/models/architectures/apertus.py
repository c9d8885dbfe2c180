"""Apertus (huggingface.co/swiss-ai): the MLP's activation, xIELU, has learned parameters per
layer.

Schema: `config/vendors/swiss_ai.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from kernels import rowwise, xielu
from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.llama import LlamaLayer
from worker.models.layers.attention import MLP
from worker.models.layers.linear_method import WeightSlot


class XieluMLP(MLP):
    """An ungated MLP: down(xielu(up(x))). Checkpoints store the parameters b and e of `xielu`
    directly; p and n - b are the softplus of the stored values."""

    _NAMES = ("alpha_p", "alpha_n", "beta", "eps")

    def __init__(self, model: DecoderModel) -> None:
        super().__init__(model.config, model.options, self._xielu)
        self._numbers = torch.empty(len(self._NAMES), device=model.options.device)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of the two projections and of the activation; `prefix` ends with a dot."""
        yield from super().weight_slots(prefix)
        for index, name in enumerate(self._NAMES):
            yield WeightSlot(
                name=f"{prefix}act_fn.{name}",
                destination=self._numbers[index : index + 1],
                full_shape=(1,),
                may_lack_ones=True,
            )

    def process_after_loading(self) -> None:
        """Packs the projections, and computes the activation's parameters p, n, b and e."""
        super().process_after_loading()
        slope, limit = self._numbers[2:]
        positive, negative = rowwise.softplus(self._numbers[:2])
        self._numbers = torch.stack((positive, slope + negative, slope, limit))

    def _xielu(self, x: torch.Tensor) -> torch.Tensor:
        return xielu(x, self._numbers)


class ApertusLayer(LlamaLayer):
    """Llama layer with different checkpoint names for the norms."""

    norm_names: ClassVar[tuple[str, ...]] = ("attention_layernorm", "feedforward_layernorm")


class ApertusForCausalLM(DecoderModel):
    """Llama with QK norm and an ungated xIELU MLP."""

    def build_layer(self, index: int) -> ApertusLayer:
        """Builds a layer; each has its own activation parameters."""
        return ApertusLayer(self, index, XieluMLP(self))
