"""Torch reference of penalties, which reads a request's tokens and not the whole vocabulary."""

from __future__ import annotations

import torch

from kernels.penalties.base import PenaltyRows


def apply_penalties_(
    logits: torch.Tensor,
    rows: PenaltyRows,
    in_prompt: torch.Tensor,
    counts: torch.Tensor,
    token_pool: torch.Tensor,
) -> None:
    """Gathers the logits of each request's tokens, penalizes them, and scatters them back."""
    tokens = token_pool[:, : rows.longest].index_select(0, rows.slots).long()
    beyond = torch.arange(rows.longest, device=tokens.device) >= rows.ends.unsqueeze(1)
    # A token that occurs several times is computed several times, to the same value.
    tokens = torch.where(beyond, tokens[:, :1], tokens)
    cells, places = (rows.slots.unsqueeze(1), tokens), (rows.rows.unsqueeze(1), tokens)
    count = counts[cells]
    for back in range(1, rows.most_drafts + 1):
        drafts = token_pool[rows.slots, (rows.ends - back).clamp(min=0)].unsqueeze(1)
        count += (tokens == drafts) & (rows.num_drafts >= back).unsqueeze(1)
    in_output = count > 0
    seen = in_prompt[cells].logical_or_(in_output)
    found = logits[places]
    repetition = rows.repetition.unsqueeze(1)
    repeated = torch.where(found > 0, found / repetition, found * repetition)
    found = torch.where(seen, repeated, found)
    found -= count * rows.frequency.unsqueeze(1)
    found -= in_output * rows.presence.unsqueeze(1)
    logits.index_put_(places, found)


def count_tokens_(counts: torch.Tensor, rows: PenaltyRows, tokens: torch.Tensor) -> None:
    """Adds 1 at each drawn token."""
    drawn = tokens.index_select(0, rows.rows)
    cells = rows.slots * counts.shape[1] + drawn
    counts.view(-1).index_add_(0, cells, torch.ones_like(cells, dtype=torch.int32))
