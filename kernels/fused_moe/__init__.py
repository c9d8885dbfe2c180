"""Fused mixture of experts (MoE): MLPs, gated or not, of which each token uses a few."""

from __future__ import annotations

from kernels.activation.base import GELU, SILU, SQUARED_RELU, Activation
from kernels.choose_experts.base import ExpertChoice
from kernels.fused_moe.base import (
    ExpertBiases,
    Experts,
    ExpertWeights,
    ExtraTerms,
    pack_quantized_experts,
)
from kernels.fused_moe.reference import fused_moe

__all__ = [
    "GELU",
    "SILU",
    "SQUARED_RELU",
    "Activation",
    "ExpertBiases",
    "ExpertChoice",
    "ExpertWeights",
    "Experts",
    "ExtraTerms",
    "fused_moe",
    "pack_quantized_experts",
]
