"""Sampling of tokens: greedy and random rows of a batch in one call, with parameters on the
device."""

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
    """Samples one token per row of fp32 logits [R, vocab]: int64 [R].

    A row's sample is a function of its own logits, parameters, seed and position. Does not wait for
    the device, and launches only depend on shapes: a captured graph samples any mixture of greedy
    and random rows. For rows without a finite logit the token is arbitrary.

    Args:
        logits: fp32 [R, vocab].
        parameters: sampling parameters of the rows.
        out: int64 [R], for the result; None for a new tensor.
        cells: further cells that the tokens are written to; None for none.
    """
    return _SAMPLE.select(logits)(logits, parameters, out, cells)


__all__ = ["GREEDY_BELOW", "SamplingParameters", "TokenCells", "sample_tokens"]
