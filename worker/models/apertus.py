"""Apertus (huggingface.co/swiss-ai): the MLP's activation is learned, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from kernels import xielu
from worker.models.decoder import DecoderModel
from worker.models.layers import MLP
from worker.models.linear_method import WeightSlot
from worker.models.llama import LlamaLayer


class XieluMLP(MLP):
    """down(xielu(up(x))). A checkpoint holds the numbers b and e of `xielu` and, before softplus, p
    and n - b."""

    _NAMES = ("alpha_p", "alpha_n", "beta", "eps")

    def __init__(self, model: DecoderModel) -> None:
        super().__init__(model.config, model.options, self._xielu)
        self._numbers = torch.empty(len(self._NAMES), device=model.options.device)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Slots of both projections and of the activation; `prefix` ends with a dot."""
        yield from super().weight_slots(prefix)
        for index, name in enumerate(self._NAMES):
            yield WeightSlot(
                name=f"{prefix}act_fn.{name}",
                destination=self._numbers[index : index + 1],
                full_shape=(1,),
                may_lack_ones=True,
            )

    def pack(self) -> None:
        """Packs the projections, and brings the activation's numbers into its formula's form."""
        super().pack()
        positive, negative, slope, limit = self._numbers.unbind()
        positive, negative = (
            torch.nn.functional.softplus(number) for number in (positive, negative)
        )
        self._numbers = torch.stack((positive, slope + negative, slope, limit))

    def _xielu(self, x: torch.Tensor) -> torch.Tensor:
        return xielu(x, self._numbers)


class ApertusLayer(LlamaLayer):
    """Llama's by other names."""

    norm_names: ClassVar[tuple[str, ...]] = ("attention_layernorm", "feedforward_layernorm")


class ApertusForCausalLM(DecoderModel):
    """Each head of q and k is normalised."""

    def build_layer(self, index: int) -> ApertusLayer:
        """Every layer is alike but for its activation."""
        return ApertusLayer(self, index, XieluMLP(self))
