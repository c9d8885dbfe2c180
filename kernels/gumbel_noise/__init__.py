"""Gumbel noise keyed by (seed, position, column): sampling is an argmax of logits plus noise."""

from __future__ import annotations

import torch

from kernels.gumbel_noise import reference
from kernels.registry import registry

_GUMBEL_NOISE = registry.register(
    "gumbel_noise",
    reference.gumbel_noise,
    triton="kernels.gumbel_noise.triton_kernel:gumbel_noise",
)


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Noise, fp32 [B, vocab_size], for seeds [B] and positions [B], both int64.

    A pure function of (seed, position, column), independent of the batch, the step and the order of
    requests. Uses all 64 bits of a seed, and the low 32 bits of a position. Torch and Triton
    compute the same integers; the logarithms may differ in their last bits.
    """
    return _GUMBEL_NOISE.select(seeds)(seeds, positions, vocab_size)


__all__ = ["gumbel_noise"]
