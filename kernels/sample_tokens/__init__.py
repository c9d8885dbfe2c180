"""Draws of tokens: greedy and random rows of a batch in one call, parameters on the device."""

from __future__ import annotations

import torch

from kernels.registry import registry
from kernels.sample_tokens import reference
from kernels.sample_tokens.base import GREEDY_BELOW, SamplingParameters, TokenCells

_SAMPLE = registry.register(
    "sample_tokens",
    reference.sample_tokens,
    triton="kernels.sample_tokens.triton_kernel:sample_tokens",
)


def sample_tokens(
    logits: torch.Tensor,
    parameters: SamplingParameters,
    out: torch.Tensor | None = None,
    cells: TokenCells | None = None,
) -> torch.Tensor:
    """One token per row of fp32 logits [R, vocab]: int64 [R], into `out` where given, and into
    `cells` besides.

    A row's draw is a function of its own logits, parameters, seed and position. Nothing waits for
    the device, and shapes alone decide what is launched: a captured graph draws any mixture of
    greedy and random rows from the same tensors. Rows without a finite logit yield some token.
    """
    return _SAMPLE.select(logits)(logits, parameters, out, cells)


__all__ = ["GREEDY_BELOW", "SamplingParameters", "TokenCells", "sample_tokens"]
