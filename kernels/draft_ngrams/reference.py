"""Torch prompt lookup: all positions of all rows at once, token by token of the occurrence."""

from __future__ import annotations

import torch

from kernels.draft_ngrams.base import NgramLookup


def draft_ngrams(token_pool: torch.Tensor, lookup: NgramLookup) -> torch.Tensor:
    """Compare with the row shifted by 1, 2, ... tokens."""
    newest, num_tokens = lookup.newest, lookup.num_tokens
    rows = token_pool[lookup.slots, :num_tokens]
    places = torch.arange(num_tokens, device=rows.device)
    is_alike = places <= newest[:, None]
    lengths = torch.zeros(rows.shape, dtype=torch.int64, device=rows.device)
    for size in range(1, min(lookup.longest, num_tokens) + 1):
        last = rows.gather(1, (newest + 1 - size).clamp(min=0)[:, None])
        is_alike = is_alike & (rows.roll(size, dims=1) == last) & (places >= size)
        lengths += is_alike
    scores = torch.where(lengths >= lookup.shortest, lengths * num_tokens + places, 0)
    best = scores.amax(dim=1)
    place = torch.where(best > 0, best % num_tokens, newest)[:, None]
    period = newest[:, None] + 1 - place
    return rows.gather(1, place + torch.arange(lookup.count, device=rows.device) % period)
