"""Torch reference of sampling: logits divided by temperature, filtered, plus keyed noise.

HAZARD(invariance): a row's sample must not depend on other rows. All operations are elementwise
operations, comparisons or integer sums; floating-point sums are avoided, since their order may
depend on the number of rows.
"""

from __future__ import annotations

import torch

from kernels.gumbel_noise import gumbel_noise
from kernels.registry import op
from kernels.sample_tokens.base import GREEDY_BELOW, SamplingParameters, TokenCells
from kernels.sample_tokens.thresholds import top_k_threshold, top_p_threshold


@op
def sample_tokens(
    logits: torch.Tensor,
    parameters: SamplingParameters,
    out: torch.Tensor | None = None,
    cells: TokenCells | None = None,
) -> torch.Tensor:
    """Samples one token per row of fp32 logits [R, vocab]: int64 [R].

    A row's sample is a function of its own logits, parameters, seed and position. Does not wait for
    the device. Launches depend only on shapes, so a captured graph samples any mix of greedy and
    random rows. For rows without a finite logit the token is arbitrary.

    Args:
        logits: fp32 [R, vocab].
        parameters: sampling parameters of the rows.
        out: int64 [R], for the result; None for a new tensor.
        cells: further cells to which the tokens are written; None if unused.
    """
    # Greedy rows are sampled like the others, and their tokens replaced.
    is_greedy = parameters.temperature < GREEDY_BELOW
    noise = gumbel_noise(parameters.seeds, parameters.positions, logits.shape[-1])
    sampled = noise.add_(masked_logits(logits, parameters)).argmax(dim=-1)
    tokens = torch.where(is_greedy, logits.argmax(dim=-1), sampled)
    if cells is not None:
        cells.tokens.index_copy_(0, cells.cells, tokens.int())
    return tokens if out is None else out.copy_(tokens)


def masked_logits(logits: torch.Tensor, parameters: SamplingParameters) -> torch.Tensor:
    """Logits divided by temperature, with -inf for tokens excluded by min-p, top-k or top-p. Logits
    of greedy rows are not divided.

    The order is vLLM's: temperature, min-p, top-k, then top-p over the remaining tokens.
    """
    temperature = parameters.temperature
    temperature = temperature.masked_fill(temperature < GREEDY_BELOW, 1.0)
    scaled = logits / temperature.unsqueeze(1)
    if parameters.log_min_p is not None:
        _drop_below(scaled, scaled.amax(dim=-1) + parameters.log_min_p)
    if parameters.top_k is not None:
        max_top_k = parameters.max_top_k
        if max_top_k is None:
            # Reading the maximum would wait for the device; the vocabulary size is also a bound.
            is_known = parameters.top_k.is_cpu
            max_top_k = int(parameters.top_k.max()) if is_known else logits.shape[-1]
        _drop_below(scaled, top_k_threshold(scaled, parameters.top_k, max(1, max_top_k)))
    if parameters.top_p is not None:
        _drop_below(scaled, top_p_threshold(scaled, parameters.top_p))
    return scaled


def _drop_below(logits: torch.Tensor, threshold: torch.Tensor) -> None:
    """Masks logits below the threshold. Equal logits are kept, so that ties are not broken
    arbitrarily."""
    logits.masked_fill_(logits < threshold.unsqueeze(1), float("-inf"))
