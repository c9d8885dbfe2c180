"""Apertus (huggingface.co/swiss-ai): the MLP's activation is learned, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from worker.models.decoder import DecoderModel
from worker.models.layers import MLP
from worker.models.linear_method import WeightSlot
from worker.models.llama import LlamaLayer


class XieluMLP(MLP):
    """down(xielu(up(x))), where xielu (arXiv 2411.13010) is p x² + b x of what is positive, and
    n (exp(min(x, e)) - 1 - x) + b x of the rest. A checkpoint holds b, e and, before softplus, p
    and n - b."""

    _NAMES = ("alpha_p", "alpha_n", "beta", "eps")

    def __init__(self, model: DecoderModel) -> None:
        super().__init__(model.config, model.options, self._xielu)
        self._loaded = torch.empty(len(self._NAMES), device=model.options.device)
        self._positive, self._negative, self._beta, self._eps = self._loaded.unbind()

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Slots of both projections and of the activation; `prefix` ends with a dot."""
        yield from super().weight_slots(prefix)
        for index, name in enumerate(self._NAMES):
            yield WeightSlot(
                name=f"{prefix}act_fn.{name}",
                destination=self._loaded[index : index + 1],
                full_shape=(1,),
                may_lack_ones=True,
            )

    def pack(self) -> None:
        """Packs the projections, and brings the activation's numbers into its formula's form."""
        super().pack()
        positive, negative, self._beta, self._eps = self._loaded.unbind()
        self._positive = torch.nn.functional.softplus(positive)
        self._negative = self._beta + torch.nn.functional.softplus(negative)

    def _xielu(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        falling = self._negative * (torch.expm1(torch.minimum(wide, self._eps)) - wide)
        curve = torch.where(wide > 0, self._positive * wide.square(), falling)
        return (curve + self._beta * wide).to(x.dtype)


class ApertusLayer(LlamaLayer):
    """Llama's by other names."""

    norm_names: ClassVar[tuple[str, ...]] = ("attention_layernorm", "feedforward_layernorm")


class ApertusForCausalLM(DecoderModel):
    """Each head of q and k is normalised."""

    def build_layer(self, index: int) -> ApertusLayer:
        """Every layer is alike but for its activation."""
        return ApertusLayer(self, index, XieluMLP(self))
