"""Torch draws: logits over temperature, filtered, plus keyed noise.

HAZARD(invariance): a row's draw must not depend on the other rows. Everything here works token by
token, compares, or sums integers: floating-point sums may be split differently for another number
of rows and are therefore avoided.
"""

from __future__ import annotations

import torch

from kernels.gumbel_noise import gumbel_noise
from kernels.sample_tokens.base import GREEDY_BELOW, SamplingParameters
from kernels.sample_tokens.thresholds import top_k_threshold, top_p_threshold


def sample_tokens(
    logits: torch.Tensor, parameters: SamplingParameters, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Draw for every row, and take the likeliest token where the row is greedy."""
    is_greedy = parameters.temperature < GREEDY_BELOW
    top_k = parameters.top_k
    # A device would have to be waited for; the vocabulary bounds every top-k.
    max_top_k = max(1, int(top_k.max())) if top_k is not None and top_k.is_cpu else logits.shape[-1]
    scaled = masked_logits(
        logits,
        temperature=parameters.temperature.masked_fill(is_greedy, 1.0),
        top_k=top_k,
        max_top_k=max_top_k,
        top_p=parameters.top_p,
        log_min_p=parameters.log_min_p,
    )
    noise = gumbel_noise(parameters.seeds, parameters.positions, logits.shape[-1])
    drawn = noise.add_(scaled).argmax(dim=-1)
    tokens = torch.where(is_greedy, logits.argmax(dim=-1), drawn)
    return tokens if out is None else out.copy_(tokens)


def masked_logits(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    max_top_k: int,
    top_p: torch.Tensor | None,
    log_min_p: torch.Tensor | None,
) -> torch.Tensor:
    """Logits over temperature, with -inf where min-p, top-k or top-p leave a token out.

    The order is vLLM's: temperature, min-p, top-k, then top-p on what top-k kept.
    """
    scaled = logits / temperature.unsqueeze(1)
    if log_min_p is not None:
        _drop_below(scaled, scaled.amax(dim=-1) + log_min_p)
    if top_k is not None:
        _drop_below(scaled, top_k_threshold(scaled, top_k, max_top_k))
    if top_p is not None:
        _drop_below(scaled, top_p_threshold(scaled, top_p))
    return scaled


def _drop_below(logits: torch.Tensor, threshold: torch.Tensor) -> None:
    """What equals the threshold stays, so that ties are not cut arbitrarily."""
    logits.masked_fill_(logits < threshold.unsqueeze(1), float("-inf"))
