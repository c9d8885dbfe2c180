"""Phi-3.5-MoE (huggingface.co/microsoft): LayerNorm with bias, and experts chosen by SparseMixer.

Schema: `config/vendors/microsoft.py`.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from kernels import ExpertChoice
from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.llama import LlamaLayer
from worker.models.architectures.stablelm import StableLmForCausalLM
from worker.models.layers.moe import MoeMLP, MoeNames

_NAMES = MoeNames(gate="w1", up="w3", down="w2")


class SparseMixerMLP(MoeMLP):
    """Two experts per token; the second is chosen as if the first did not exist (SparseMixer, arXiv
    2409.12136).

    Args:
        model: the model that the layer belongs to.
    """

    needs_fp32: ClassVar[bool] = False
    """Always False, since a LayerNorm with bias has only one output."""

    def __init__(self, model: DecoderModel) -> None:
        super().__init__(model.config, model.options, _NAMES)
        self._tolerance = 2 * float(model.extra("router_jitter_noise"))

    def _choose(
        self, hidden: torch.Tensor, fp32_input: torch.Tensor | None
    ) -> tuple[ExpertChoice, None]:
        scores = self._router.forward(hidden.float() if fp32_input is None else fp32_input)
        first, first_weight = self._best(scores, scores)
        others = scores.scatter(1, first, -torch.inf)
        second, second_weight = self._best(others, scores)
        return ExpertChoice(
            torch.cat((first, second), dim=1), torch.cat((first_weight, second_weight), dim=1)
        ), None

    def _best(
        self, candidates: torch.Tensor, scores: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The best expert [T, 1] and its weight [T, 1], from a softmax over the candidates whose
        scores are nearly as high.

        Args:
            candidates: fp32 [T, E]: scores, -inf for experts that are already chosen.
            scores: fp32 [T, E]: scores of all experts.
        """
        best, expert = candidates.max(dim=1, keepdim=True)
        is_low = (best - scores) / torch.maximum(scores.abs(), best) > self._tolerance
        shares = candidates.masked_fill(is_low, -torch.inf).softmax(dim=1)
        return expert, shares.gather(1, expert)


class PhimoeForCausalLM(StableLmForCausalLM):
    """Phi-3.5-MoE: experts in all layers; the LM head has a bias."""

    head_has_bias: ClassVar[bool] = True

    def build_layer(self, index: int) -> LlamaLayer:
        """Builds a layer; all layers have the same structure."""
        return LlamaLayer(self, index, SparseMixerMLP(self), mlp_name="block_sparse_moe")
