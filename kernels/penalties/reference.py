"""Torch reference of penalties, which reads a request's tokens instead of the whole vocabulary."""

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
    """Gathers the logits of each request's tokens, penalizes them, and scatters them back. Takes
    time linear in the tokens of all rows."""
    owner = torch.repeat_interleave(rows.ends)
    firsts = rows.ends.cumsum(0) - rows.ends
    slots = rows.slots[owner]
    positions = torch.arange(len(owner), device=owner.device) - firsts[owner]
    # Repeated tokens are computed repeatedly, with the same result.
    tokens = token_pool[slots, positions].long()
    cells, places = (slots, tokens), (rows.rows[owner], tokens)
    count = counts[cells]
    for back in range(1, rows.most_drafts + 1):
        drafts = token_pool[rows.slots, (rows.ends - back).clamp(min=0)]
        count += (tokens == drafts[owner]) & (rows.num_drafts >= back)[owner]
    in_output = count > 0
    seen = in_prompt[cells].logical_or_(in_output)
    found = logits[places]
    repetition = rows.repetition[owner]
    repeated = torch.where(found > 0, found / repetition, found * repetition)
    found = torch.where(seen, repeated, found)
    found -= count * rows.frequency[owner]
    found -= in_output * rows.presence[owner]
    logits.index_put_(places, found)


def count_tokens_(counts: torch.Tensor, rows: PenaltyRows, tokens: torch.Tensor) -> None:
    """Adds 1 at each sampled token."""
    sampled = tokens.index_select(0, rows.rows)
    cells = rows.slots * counts.shape[1] + sampled
    counts.view(-1).index_add_(0, cells, torch.ones_like(cells, dtype=torch.int32))
